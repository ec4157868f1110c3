"""While the storage reads or writes below KV of the device, every token counted as evictable can be evicted."""

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_canopy.radix import storage_holds
from sglang_canopy.storage.page_table import PAGES
from support.disk_recount import recount
from support.disk_tree import DiskTree, prompt
from support.live_tree import LiveTree, check_tree

PAGE_TOKENS = 2


class PausableTree(DiskTree):
    """A tree whose storage reads and writes only while ``may_read`` and ``may_write`` are set."""

    def __init__(self, folder: Path, **options: Any) -> None:
        options.setdefault("config", {"quantum_tokens": 1})
        super().__init__(folder, write_policy="write_back", **options)
        self.may_read, self.may_write = threading.Event(), threading.Event()
        self.delay_s = 0.0
        self.resume()
        original_read, original_write = self.storage.batch_get_v1, self.storage.batch_set_v1

        def wait_and_read(*arguments: Any) -> Any:
            self.may_read.wait()
            time.sleep(self.delay_s)
            return original_read(*arguments)

        def wait_and_write(*arguments: Any) -> Any:
            self.may_write.wait()
            time.sleep(self.delay_s)
            return original_write(*arguments)

        self.storage.batch_get_v1, self.storage.batch_set_v1 = wait_and_read, wait_and_write

    @property
    def host(self) -> Any:
        return self.cache.cache_controller.mem_pool_host

    def resume(self) -> None:
        self.may_read.set()
        self.may_write.set()

    def fill_host(self) -> None:
        """Take all host slots, as retracted requests do."""
        self.cache.evict_host(self.host.size)
        self.host.alloc(self.host.available_size())

    def leave_on_disk_only(self, path: list[int]) -> None:
        self.serve(path, self.core.clock.now + 1)
        self.evict(len(path))
        self.settle()
        self.cache.evict_host(self.host.size)
        assert self.match(path) == 0
        assert self.disk_tokens(path) == len(path)

    def evict_all(self) -> None:
        """Evict as an allocation of all "available" tokens does."""
        free_tokens = self.allocator.available_size()
        evictable_tokens = self.cache.full_evictable_size()
        self.cache.evict_for_alloc(EvictParams(num_tokens=evictable_tokens))
        assert self.allocator.available_size() == free_tokens + evictable_tokens

    def count_locks(self) -> int:
        nodes = (node for node in self.core._node_arena.values() if node is not self.core.root_node)
        components = [component for node in nodes for component in node.component_data]
        return sum(component.lock_ref + component.host_lock_ref for component in components)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[PausableTree]:
    tree = PausableTree(tmp_path / "disk")
    yield tree
    tree.resume()
    tree.close()


def test_the_disk_is_read_below_kv_that_only_the_device_holds(tree: PausableTree) -> None:
    tree.leave_on_disk_only(prompt(1, 16))
    tree.insert(prompt(1, 8), tree.request(2.0, prompt_tokens=8))
    assert tree.match(prompt(1, 16)) == 8
    assert tree.serve(prompt(1, 16), 3.0) == 16
    assert tree.kv(prompt(1, 16)) == prompt(1, 16)
    check_tree(tree)


@pytest.mark.parametrize("is_reading", [True, False], ids=["reading", "looking up"])
def test_the_anchor_of_a_read_is_evictable(tree: PausableTree, is_reading: bool) -> None:
    tree.leave_on_disk_only(prompt(1, 16))
    tree.insert(prompt(1, 8), tree.request(2.0, prompt_tokens=8))
    tree.may_read.clear()
    handle = tree.begin_fetch(prompt(1, 16))
    assert handle in tree.cache.ongoing_prefetch
    if is_reading:
        tree._process_messages(n_storage_hit=1)
        assert tree.cache.ongoing_prefetch[handle].host_indices is not None
    assert tree.count_locks() == 1
    tree.fill_host()
    tree.evict_all()
    assert tree.count_locks() == 0
    assert tree.cache.check_prefetch_progress(handle)  # its request is admitted, without the read
    assert tree.match(prompt(1, 16)) == 0
    assert tree.cache.storage_holds.reads_cancelled == 1
    tree.cache.sanity_check()


def _begin_write_below_device(tree: PausableTree) -> None:
    """Leave 8 tokens on the device alone, with 8 tokens below them that are being written."""
    tree.leave_on_disk_only(prompt(1, 8))
    tree.serve(prompt(1, 8), 2.0)
    tree.cache.evict_host(tree.host.size)  # the copy on the host was a duplicate
    tree.serve(prompt(1, 16), 3.0)
    tree.may_write.clear()
    tree.evict(8)  # the second half, which is being written
    assert tree.cache.ongoing_backup
    tree.fill_host()
    assert tree.match(prompt(1, 16)) == 8


def test_the_device_kv_above_a_write_is_evictable(tree: PausableTree) -> None:
    """SGLang has this fault too, but reads the disk only below the root."""
    _begin_write_below_device(tree)
    threading.Timer(0.2, tree.may_write.set).start()
    tree.evict_all()
    tree.settle()
    assert tree.count_locks() == 0
    assert (tree.cache.storage_holds.wait_count, tree.cache.storage_holds.timeout_count) == (1, 0)
    assert tree.cache.storage_holds.longest_wait_s > 0
    tree.cache.sanity_check()


def test_a_storage_that_never_responds_ends_the_wait_and_the_tier(tree, monkeypatch):
    monkeypatch.setattr(storage_holds, "MAX_WAIT_S", 0.2)
    _begin_write_below_device(tree)
    free_host_tokens = tree.host.available_size()
    tree.evict_all()
    assert tree.count_locks() == 0
    assert tree.cache.storage_holds.timeout_count == 1
    assert tree.store.unavailable == "a write has not ended after 0.2 s"
    assert tree.disk_tokens(prompt(1, 8)) == 0
    # Other KV takes the memory of the write that has not begun.
    tree.cache.evict_host(tree.host.size)
    assert tree.host.available_size() > free_host_tokens
    slots = tree.host.alloc(tree.host.available_size())
    for buffers in tree.host.anchor_entry.host_pool.kv_buffer:
        buffers.fill_(7)
    # Neither this write nor an attempt to open the folder changes the tier before the write's end.
    tree.storage.maintain()
    with monkeypatch.context() as patch:
        patch.setattr(tree, "settle", lambda: LiveTree.settle(tree))  # waits for no write
        tree.serve(prompt(4, 8), 8.0)
        tree.evict_all()
    assert tree.store.unavailable
    tree.may_write.set()
    tree.settle()
    tree.host.free(slots)
    assert not tree.cache.ongoing_backup
    # The tier is used again, without a page of that write.
    tree.request(1000.0, prompt_tokens=1)
    tree.storage.maintain()
    assert tree.store.unavailable is None
    assert tree.core.disk.suspended
    tree.request(2000.0, prompt_tokens=1)
    assert not tree.core.disk.suspended
    assert tree.disk_tokens(prompt(1, 16)) == 8
    recount(tree.store)
    tree.leave_on_disk_only(prompt(3, 8))
    assert tree.serve(prompt(3, 8), 3000.0) == 8
    assert tree.kv(prompt(3, 8)) == prompt(3, 8)


def test_an_ancestor_is_demoted_only_after_its_copy(tree: PausableTree) -> None:
    """Ancestors are copied before their leaf. The host has no room for the leaf's own copy."""
    tree.insert(prompt(1, 8), tree.request(1.0, prompt_tokens=8))
    tree.insert(prompt(1, 16), tree.request(2.0, prompt_tokens=16))
    tree.insert(prompt(2, 8), tree.request(3.0, prompt_tokens=8))
    tree.host.alloc(tree.host.available_size() - 8)  # room for the first half alone
    tree.evict_all()
    tree.settle()
    assert tree.count_locks() == 0
    assert tree.load_back(prompt(1, 16)) == 8
    assert tree.kv(prompt(1, 16)) == prompt(1, 8)
    assert tree.disk_tokens(prompt(1, 16)) == 8
    tree.cache.sanity_check()


class RandomActions:
    """Random requests, reads, aborts, retractions and evictions on a tree with a slow storage."""

    def __init__(self, tree: PausableTree, seed: int) -> None:
        self.tree, self.rng = tree, random.Random(seed)
        self.retracted_slots: list[Any] = []
        self.handles: list[Any] = []
        self.paths = [self.random_path() for _ in range(30)]

    def random_path(self) -> list[int]:
        """Return a path of pages, each of which is one of two at its depth."""
        path = []
        for depth in range(self.rng.randrange(4, 13)):
            first_token = 100 * depth + 10 * self.rng.randrange(2)
            path += range(first_token, first_token + PAGE_TOKENS)
        return path

    def act(self, now: float) -> None:
        actions = (self.compute, self.compute, self.read, self.drain, self.retract, self.abort)
        action = self.rng.choice([*actions, lambda _path, _now: self.tree.evict_all()])
        action(self.rng.choice(self.paths), now)
        self.check_tree()

    def compute(self, path: list[int], now: float) -> None:
        tree = self.tree
        request = tree.request(now, prompt_tokens=len(path))
        tree.load_back(path)
        tree.core.requests.finish(request)
        tree.insert(path, request)
        assert tree.match(path) == len(path)

    def read(self, path: list[int], now: float) -> None:
        self.handles.append(self.tree.begin_fetch(path))

    def drain(self, *_: Any) -> None:
        drain = self.tree.cache._drain_storage_control_queues_impl
        drain(None, None, None, None, {}, log_metrics=False)

    def retract(self, *_: Any) -> None:
        tree = self.tree
        if self.retracted_slots:
            tree.host.free(self.retracted_slots.pop())
            return
        tree.cache.evict_host(24)
        if tree.host.available_size():
            self.retracted_slots.append(tree.host.alloc(min(24, tree.host.available_size())))

    def abort(self, *_: Any) -> None:
        if self.handles:
            handle = self.handles.pop(self.rng.randrange(len(self.handles)))
            self.tree.cache.release_aborted_request(handle)

    def check_tree(self) -> None:
        tree = self.tree
        for path in self.paths:
            assert tree.kv(path) == path[: tree.match(path)]
        tree.cache.sanity_check()
        for node in tree.core._node_arena.values():
            if node.write_through_pending_id is not None:
                # While its copy is pending, a node stays on the device.
                assert node.write_through_pending_id in tree.cache.ongoing_write_through
                assert not node.evicted

    def finish(self) -> None:
        """Let every read and write end."""
        cache, deadline = self.tree.cache, time.monotonic() + 60
        while (cache.ongoing_prefetch or cache.ongoing_backup) and time.monotonic() < deadline:
            self.drain()
        time.sleep(0.1)
        self.drain()
        for slots in self.retracted_slots:
            self.tree.host.free(slots)


@pytest.mark.parametrize("seed", range(8))
def test_every_prompt_gets_memory_while_the_storage_is_slow(tmp_path: Path, seed: int) -> None:
    tree = PausableTree(tmp_path / "disk", host_tokens=36)
    tree.delay_s = 0.003
    tree.settle = lambda: LiveTree.settle(tree)  # does not wait for the storage
    try:
        actions = RandomActions(tree, seed)
        for now in range(150):
            actions.act(float(now))
        actions.finish()
        assert tree.count_locks() == 0
        assert tree.cache.cache_controller.prefetch_tokens_occupied == 0
        check_tree(tree)
        recount(tree.store)
    finally:
        tree.cache.shutdown()
        PAGES.clear()
