"""SGLang servers that write to and read from a real Mooncake master and store on loopback.

Needs Mooncake's wheel and the libraries it loads (docs/guide/mooncake.md); skipped without.
"""

import json
import math

import pytest

from sglang_canopy.disk.page import PageMeta
from sglang_canopy.storage.mooncake import MAX_PIN_S, pin_s
from sglang_canopy.ttl.table import Group, TTLTable
from support.mooncake_cluster import PAGE, SEGMENT_BYTES, cluster, until, wheel

__all__ = ["cluster", "wheel"]


def test_two_servers_at_once_share_pages_and_ttls_become_pins(
    cluster, server, tiny_model, tmp_path
) -> None:
    """A server reads the pages of another; under pressure, pages with a TTL stay and others are evicted."""
    ttl = {"residual_ttl_s": 0, "categories": {"system": 3600}}
    flags = ("--radix-eviction", "wa", "--canopy-ttl", json.dumps(ttl), *cluster.flags())
    keep, drop = [[(i * step) % 9000 + 100 for i in range(320)] for step in (37, 53)]
    pages = 320 // PAGE
    with (
        server(tiny_model, *flags, kv_tokens=2048) as writer,
        server(tiny_model, *flags, kv_tokens=2048) as reader,
    ):
        first = writer.generate(keep, 8, custom_params={"canopy_category": "system"})
        writer.generate(drop, 8, custom_params={"canopy_category": "once"})
        until(lambda: cluster.count("master_key_count") >= 2 * 2 * pages)  # K and V of both
        assert cluster.count("master_soft_pin_key_count") == 2 * pages

        second = reader.generate(keep, 8, custom_params={"canopy_category": "system"})
        found = second["meta_info"]["cached_tokens_details"]
        assert found["storage"] == 320 - PAGE  # a prompt's last page is computed
        assert second["output_ids"] == first["output_ids"]

        room = SEGMENT_BYTES // (64 << 10)
        until(lambda: cluster.fill(room // 4) and cluster.count("master_evicted_key_count") > room)
        reader.flush()
        assert reader.cached(keep)["storage"] == 320 - PAGE
        assert reader.cached(drop)["storage"] == 0


# ---- what becomes of a TTL ----


@pytest.mark.parametrize(
    ("meta", "pin"),
    [
        (None, 0.0),  # nothing is known of the page
        (PageMeta(group=0), 600.0),  # its group's TTL
        (PageMeta(group=-1), 0.0),  # the residual group's, which is 0
        (PageMeta(group=-1, category="api|end|turn1"), 30.0),
        (PageMeta(group=0, ttl_s=5.0), 5.0),  # the request's own
        (PageMeta(group=1), MAX_PIN_S),  # without end: as long as Mooncake pins
        (PageMeta(group=-1, keep_until=1090.0), 90.0),
        (PageMeta(group=0, keep_until=1090.0), 600.0),
        (PageMeta(group=-1, keep_until=900.0), 0.0),  # over
    ],
)
def test_a_page_is_pinned_for_its_ttl(meta: PageMeta | None, pin: float) -> None:
    groups = (Group(7, 600.0), Group(8, math.inf))
    table = TTLTable(groups, residual_ttl_s=0.0, categories={"api": 30.0})
    assert pin_s(meta, table, 1000.0) == pin


def test_without_ttls_only_requested_pins_are_set() -> None:
    assert pin_s(PageMeta(), None, 1000.0) == 0.0
    assert pin_s(PageMeta(ttl_s=60.0), None, 1000.0) == 60.0
    assert pin_s(PageMeta(keep_until=1010.0), None, 1000.0) == 10.0
