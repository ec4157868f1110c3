"""Live trees above a real Mooncake: shared pages, and the lifetime of a used page.

Each tree is a client of its own. Needs the wheel (docs/guide/mooncake.md); skipped without."""

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
from support.disk_tree import FIRST_RANK, DiskTree
from support.live_tree import LiveTree, check_tree
from support.mooncake_cluster import cluster, mooncake_folder
from support.served import wait_until

__all__ = ["cluster", "mooncake_folder"]
PIN_TTL_S = 3.0


@pytest.fixture
def open_tree(cluster) -> Iterator[Callable[..., DiskTree]]:
    """``open_tree(ttl_s)``: a real tree whose storage is the cluster."""
    trees: list[Any] = []
    stack = contextlib.ExitStack()
    stack.enter_context(get_parallel().override(**FIRST_RANK))

    def build(ttl_s: float) -> DiskTree:
        mooncake.install_backend(TTLTable(residual_ttl_s=ttl_s))
        trees.append(MooncakeTree(cluster.client_config()))
        return trees[-1]

    yield build
    for tree in trees:
        tree.cache.shutdown()
    stack.close()


class MooncakeTree(DiskTree):
    """A live tree with a host tier, above the cluster instead of a disk."""

    def __init__(self, client_config: dict[str, Any]) -> None:
        PAGES.clear()
        extra_config = {**client_config, "prefetch_threshold": 1}
        arguments = {
            "hicache_storage_backend": "mooncake",
            "hicache_storage_backend_extra_config": json.dumps(extra_config),
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_mem_layout": "page_first_direct",
        }
        LiveTree.__init__(self, 64, page_size=2, host_tokens=128, storage_arguments=arguments)
        self.epoch, self.delivers_reports = 0.0, False
        self.storage = self.cache.cache_controller.storage_backend

    def disk_tokens(self, tokens: list[int]) -> int:
        return self.storage.batch_exists(self.keys(tokens)) * self.page_size


def test_a_page_in_use_outlives_its_pin_and_an_unused_one_does_not(cluster, open_tree) -> None:
    """A query renews only a short lease; another write renews the pin."""
    tree = open_tree(PIN_TTL_S)
    used_path, unused_path = list(range(300, 308)), list(range(400, 408))
    begin_s = time.monotonic()
    tree.serve(used_path, 0.0)
    tree.serve(unused_path, 0.0)

    def is_evicted() -> bool:
        now = time.monotonic() - begin_s
        tree.serve(used_path, now)
        tree.request(now)
        tree.settle()
        cluster.fill(1500)  # three times the memory, and longer than a query's lease
        assert tree.disk_tokens(used_path) == 8
        return tree.disk_tokens(unused_path) == 0 and now > 3 * PIN_TTL_S

    wait_until(is_evicted)
    check_tree(tree)


def test_writes_that_renew_a_pin_have_a_budget(open_tree, monkeypatch) -> None:
    monkeypatch.setattr(disk_retry, "RENEWAL_BYTES_PER_S", 1e-3)  # one node, then nothing for long
    tree = open_tree(60.0)
    rewritten_keys = []
    original_rewrite = tree.storage._rewrite

    def record_and_rewrite(keys, now):
        rewritten_keys.extend(keys)
        return original_rewrite(keys, now)

    monkeypatch.setattr(tree.storage, "_rewrite", record_and_rewrite)
    prompts = [list(range(500, 508)), list(range(600, 608))]
    for prompt in prompts:
        tree.serve(prompt, 0.0)
    for time_s in (40.0, 41.0, 42.0):
        for prompt in prompts:
            tree.serve(prompt, time_s)
    assert rewritten_keys == tree.keys(prompts[0])


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
