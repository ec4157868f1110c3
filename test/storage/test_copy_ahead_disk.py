"""Copies ahead of eviction over a disk: it gets what write_through would give it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_canopy.config.tiers import TierOptions
from sglang_canopy.storage import disk_link
from sglang_canopy.storage.page_table import PAGES
from support.disk_tree import DiskTree
from support.live_tree import check

PAGE = 2


def copying(folder: Path, ahead: int | str | None = 8, **more) -> DiskTree:
    options = {"config": {"quantum_tokens": 1}, "write_policy": "write_back", **more}
    return DiskTree(folder / "disk", tiers=TierOptions(copy_ahead=ahead), **options)


def steps(tree: DiskTree, count: int = 6) -> None:
    for _ in range(count):
        tree.cache.check_hicache_events()
        tree.settle()


def path(name: int, count: int) -> list[int]:
    return [name * 100 + i for i in range(count)]


@pytest.fixture(autouse=True)
def clean():
    yield
    PAGES.clear()


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_what_sglangs_policies_promise_the_disk(tmp_path: Path, write_policy: str) -> None:
    """``write_through``: all that was computed. ``write_back``: what has left the device."""
    tree = copying(tmp_path, None, write_policy=write_policy)
    tree.serve(path(1, 8), 1.0)
    steps(tree)
    assert tree.on_disk(path(1, 8)) == (8 if write_policy == "write_through" else 0)
    tree.close()


def test_what_was_computed_is_on_disk_soon_without_being_evicted(tmp_path: Path) -> None:
    tree = copying(tmp_path)
    tree.serve(path(1, 8), 1.0, category="chat")
    tree.serve(path(1, 8) + path(2, 6), 2.0, category="chat")
    steps(tree)
    assert tree.on_disk(path(1, 8) + path(2, 6)) == 14
    assert tree.core.ahead.counts.copied == 0
    check(tree)
    # ``kill -9``: nothing is flushed; another server opens the same folder.
    shutil.copytree(tmp_path / "disk", tmp_path / "killed" / "disk")
    tree.close()
    again = copying(tmp_path / "killed")
    again.request(3.0)
    assert again.fetch(path(1, 8) + path(2, 6)) == 14
    again.load_back(path(1, 8) + path(2, 6))
    assert again.kv(path(1, 8) + path(2, 6)) == path(1, 8) + path(2, 6)
    again.close()


def test_the_disk_costs_the_host_no_more_than_a_batch(tmp_path: Path) -> None:
    tree = copying(tmp_path, tokens=32, host_tokens=32)
    for name in range(1, 17):
        tree.serve(path(name, 8), float(name))
        steps(tree)
        assert tree.on_disk(path(name, 8)) == 8
    alone = sum(len(n.key) for n in tree.core._node_arena.values() if n.key and n.evicted)
    window = batch = 8
    assert alone >= 32 - window - batch
    check(tree)
    tree.close()


runs = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(
    requests=st.lists(runs, min_size=1, max_size=12),
    host=st.sampled_from([32, 64]),
    ahead=st.sampled_from([2, 8, "auto"]),
    policy=st.sampled_from(["canopy-lru", "wa"]),
)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_everything_computed_reaches_the_disk_whatever_happens_above(
    tmp_path: Path, requests, host, ahead, policy
) -> None:
    before, disk_link.REPORT_INTERVAL_S = disk_link.REPORT_INTERVAL_S, 0.0
    folder = tmp_path / "one"
    shutil.rmtree(folder, ignore_errors=True)
    tree = copying(folder, ahead, tokens=32, host_tokens=host, policy=policy)
    try:
        for time, run in enumerate(requests):
            tokens = [100 * at + 10 * name + i for at, name in enumerate(run) for i in range(PAGE)]
            tree.serve(tokens, float(time))
            assert tree.kv(tokens) == tokens
            tree.cache.check_hicache_events()
            tree.settle()
            check(tree)
        steps(tree, 40)
        for run in requests:
            tokens = [100 * at + 10 * name + i for at, name in enumerate(run) for i in range(PAGE)]
            assert tree.on_disk(tokens) == len(tokens)
        tree.store.verify()
    finally:
        tree.close()
        disk_link.REPORT_INTERVAL_S = before
        PAGES.clear()
