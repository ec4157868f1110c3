"""Live trees above a real Mooncake: shared pages, and the lifetime of a used page.

Each tree is a client of its own. Needs the wheel (docs/guide/mooncake.md); skipped without.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sglang.srt.runtime_context import get_parallel

from sglang_canopy.disk.page import PageMeta
from sglang_canopy.storage import disk_retry, mooncake
from sglang_canopy.storage.mooncake import MAX_PIN_S, pin_s
from sglang_canopy.storage.page_table import PAGES
from sglang_canopy.ttl.table import Group, TTLTable
from support.disk_tree import RANKS, DiskTree
from support.live_tree import LiveTree, check
from support.mooncake_cluster import cluster, mooncake_folder
from support.served import wait_until

__all__ = ["cluster", "mooncake_folder"]
TTL_S = 3.0


@pytest.fixture
def tree(cluster) -> Iterator[Callable[..., DiskTree]]:
    """``tree(ttl_s)``: a real tree whose storage is the cluster."""
    trees: list[Any] = []
    stack = contextlib.ExitStack()
    stack.enter_context(get_parallel().override(**RANKS))

    def start(ttl_s: float) -> DiskTree:
        mooncake.install_backend(TTLTable(residual_ttl_s=ttl_s))
        trees.append(MooncakeTree(cluster.client_config()))
        return trees[-1]

    yield start
    for started in trees:
        started.cache.shutdown()
    stack.close()


class MooncakeTree(DiskTree):
    """A live tree with a host tier, above the cluster instead of a disk."""

    def __init__(self, client_config: dict[str, Any]) -> None:
        PAGES.clear()
        extra_config = {**client_config, "prefetch_threshold": 1}
        storage = {
            "hicache_storage_backend": "mooncake",
            "hicache_storage_backend_extra_config": json.dumps(extra_config),
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_mem_layout": "page_first_direct",
        }
        LiveTree.__init__(self, 64, page_size=2, host_tokens=128, storage=storage)
        self.epoch, self.delivers_reports = 0.0, False
        self.storage = self.cache.cache_controller.storage_backend

    def disk_tokens(self, tokens: list[int]) -> int:
        return self.storage.batch_exists(self.keys(tokens)) * self.page_size


def test_a_page_in_use_outlives_its_pin_and_one_that_is_not_does_not(cluster, tree) -> None:
    """Queries renew no pin, only a short lease; writing again does."""
    live = tree(TTL_S)
    used, unused = list(range(300, 308)), list(range(400, 408))
    begin = time.monotonic()
    live.serve(used, 0.0)
    live.serve(unused, 0.0)

    def is_evicted() -> bool:
        now = time.monotonic() - begin
        live.serve(used, now)
        live.request(now)
        live.settle()
        cluster.fill(1500)  # three times the memory, and longer than a query's lease
        assert live.disk_tokens(used) == 8
        return live.disk_tokens(unused) == 0 and now > 3 * TTL_S

    wait_until(is_evicted)
    check(live)


def test_renewing_writes_have_a_budget(tree, monkeypatch) -> None:
    monkeypatch.setattr(disk_retry, "RENEW_BYTES_S", 1e-3)  # one node, then nothing for long
    live = tree(60.0)
    rewritten_keys = []
    rewrite = live.storage._rewrite

    def record_and_rewrite(keys, now):
        rewritten_keys.extend(keys)
        return rewrite(keys, now)

    monkeypatch.setattr(live.storage, "_rewrite", record_and_rewrite)
    prompts = [list(range(500, 508)), list(range(600, 608))]
    for prompt in prompts:
        live.serve(prompt, 0.0)
    for time_s in (40.0, 41.0, 42.0):
        for prompt in prompts:
            live.serve(prompt, time_s)
    assert rewritten_keys == live.keys(prompts[0])


@pytest.mark.parametrize(
    ("page_meta", "expected_s"),
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
def test_a_page_is_pinned_for_its_ttl(page_meta: PageMeta | None, expected_s: float) -> None:
    groups = (Group(7, 600.0), Group(8, math.inf))
    table = TTLTable(groups, residual_ttl_s=0.0, categories={"api": 30.0})
    assert pin_s(page_meta, table, 1000.0) == expected_s


def test_without_ttls_only_requested_pins_are_set() -> None:
    assert pin_s(PageMeta(), None, 1000.0) == 0.0
    assert pin_s(PageMeta(ttl_s=60.0), None, 1000.0) == 60.0
    assert pin_s(PageMeta(keep_until=1010.0), None, 1000.0) == 10.0
