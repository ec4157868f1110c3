"""Host copies made shortly before they are needed: ahead of eviction, off the critical path.

SGLang copies either at insertion (``write_through``: the host then holds what the device holds
too) or at eviction (``write_back``: the allocation waits for the copy). Here, on top of
``write_back``, the leaves that the device's policy would evict next have their copy before their
turn comes, and evicting them only releases memory. The host gives up copies of what is still well
ranked on the device first. With a disk tier what is computed is passed on to it as well, when
nothing more urgent is to be copied.

Decisions depend on the tree, the pools and SGLang's agreed acknowledgements alone: all
tensor-parallel ranks take the same ones.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sglang_canopy.policy.copy_window import CopyWindow

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    from sglang_canopy.radix.evictable import EvictableLeaves

AUTO = "auto"
"""Instead of a window's size: let it follow the rate of eviction."""
MAX_FOR_DISK = 4096
"""Nodes that wait to be passed on to the disk. More are left to their eviction."""


class CopiedTree(Protocol):
    """The part of the tree core that is used here."""

    page_size: int
    evictable_device_leaves: EvictableLeaves

    def node_by_id(self, node_id: int) -> UnifiedTreeNode:
        """The node of SGLang's handle."""

    def cut(self, node: UnifiedTreeNode, keep: int, need: int, actions: list) -> UnifiedTreeNode:
        """Split off the part of ``node`` to evict and return the node that holds it."""

    def give_up_copies(self, tokens: int) -> Any:
        """Free ``tokens`` of the host that hold what is not next to leave the device."""

    def _build_backup_kv_action(self, node: UnifiedTreeNode, write_back: bool = False) -> Any:
        """SGLang's action that copies a node to the host."""


@dataclass(slots=True)
class CopyCounts:
    """What came of the copies. Tokens since the start, where nothing else is said."""

    copied: int = 0
    """Copied ahead."""
    used: int = 0
    """The part of ``copied`` that was evicted without a wait."""
    wasted: int = 0
    """The part of ``copied`` that the host gave up before it was needed."""
    for_disk: int = 0
    """Copied only to be written to the disk."""
    passed_over: int = 0
    """Times that a leaf with a copy went before one of lower rank without."""
    stalls: int = 0
    """Times that an eviction waited for a copy: none was ready, or what it needed was in flight."""


class CopyAhead:
    """The copies of one tree. All calls from the scheduler's thread.

    ``tokens``: the window's size, ``None`` for one that follows the rate of eviction.
    """

    def __init__(self, core: CopiedTree, tokens: int | None) -> None:
        self.core = core
        self.tokens = tokens
        self.counts = CopyCounts()
        self.size: CopyWindow | None = None
        """Made when the host pool is known."""
        self._cache: UnifiedRadixCache | None = None
        self._window: dict[UnifiedTreeNode, None] = {}
        """Nodes that go next and have a copy, or get one now."""
        self._covered = 0
        """Tokens of ``_window``."""
        self.busy = False
        """Whether copies are being chosen now: none is worth giving up another of the window."""
        self._missed = False
        """Whether a victim had no copy since the window was last looked at."""
        self._due = 0
        self._for_disk: dict[UnifiedTreeNode, None] = {}

    def attach(self, cache: UnifiedRadixCache) -> None:
        """The cache that the tree belongs to exists now."""
        self._cache = cache

    def clear(self) -> None:
        """The tree is being emptied, and the host with it."""
        self.counts.wasted = self.counts.copied - self.counts.used
        self._window.clear()
        self._for_disk.clear()
        self._covered, self._missed, self._due = 0, False, 0

    def status(self) -> dict[str, int]:
        """Counts and sizes, for operators."""
        return {
            **dataclasses.asdict(self.counts),
            "window_tokens": 0 if self.size is None else self.size.tokens,
            "covered_tokens": self._covered,
            "nodes_for_disk": len(self._for_disk),
        }

    def expect(self, tokens: int) -> None:
        """Requests that wait or are half computed will take ``tokens`` in the next steps; equal on
        all ranks."""
        self._due = tokens

    # ---- once a scheduling step ----

    def step(self) -> None:
        """Copy some of what goes next; where that has its copies, some of what the disk lacks.

        One batch at a time: the next one starts when SGLang has the acknowledgement of this one, so
        that no more is under way than the link gets done. Loads of requests that wait come first,
        unless hardly a copy is left.
        """
        cache = self._cache
        if cache is None or cache.cache_controller is None or not cache.is_write_back:
            return
        device = cache.token_to_kv_pool_allocator
        if self.size is None:
            host = cache.cache_controller.mem_pool_host
            self.size = CopyWindow(self.tokens, min(device.size, host.size))
        free = device.available_size()
        self.size.step(free, self._due)
        if cache.ongoing_write_through:
            return
        target = self.size.tokens - free
        loading = bool(cache.ongoing_load_back)
        if loading and not self.size.scarce(free, self._covered):
            return
        self.busy = True
        try:
            if target > 0 and (self._missed or self.size.lacks(free, self._covered)):
                self._refill(cache, target)
            elif not loading:
                self._pass_on(cache)
        finally:
            self.busy = False
        cache.cache_controller.start_writing()

    def _refill(self, cache: UnifiedRadixCache, target: int) -> None:
        """Bring the window's copies to ``target`` tokens, by at most a batch."""
        self._missed = False
        victims = self.core.evictable_device_leaves.lowest_ranked(target)
        # First what has its copy, so that no copy is given up for another of the same window.
        self._window = dict.fromkeys(node for node, _ in victims if node.backuped)
        self._covered = sum(len(node.key) for node in self._window)
        room = self._batch()
        actions: list[Any] = []
        for node, keep in victims:
            need = min(target - self._covered, room)
            if need <= 0:
                break
            if node.backuped:
                continue
            # Only the tail of a long leaf; the rest has its turn in another batch.
            node = self.core.cut(node, keep, need, actions)
            cache._apply_cache_actions(actions)
            copied = self._copy(cache, node)
            if not copied:
                break
            room -= copied
            self.counts.copied += len(node.key)
            node.canopy.copied_ahead = True
            self._window[node] = None
            self._covered += len(node.key)

    def _batch(self) -> int:
        assert self.size is not None
        return max(self.size.batch, self.core.page_size)

    def _copy(self, cache: UnifiedRadixCache, node: UnifiedTreeNode) -> int:
        """Start copying ``node``, and what the disk lacks above it. Returns the tokens; 0: no room.

        SGLang locks what it copies and lets it go at the acknowledgement.
        """
        action = self.core._build_backup_kv_action(node, write_back=True)
        nodes = [self.core.node_by_id(one) for one in action.node_ids]
        tokens = sum(len(one.key) for one in nodes if not one.backuped)
        return tokens if cache._execute_and_commit_kv_backup(action) else 0

    # ---- the disk ----

    def finished_use(self, node: UnifiedTreeNode) -> None:
        """A finished request used ``node``: the disk is to have it, as under ``write_through``."""
        if not node.canopy.on_disk and len(self._for_disk) < MAX_FOR_DISK:
            self._for_disk[node] = None

    def _pass_on(self, cache: UnifiedRadixCache) -> None:
        """Copy some of what the disk lacks; SGLang writes it there at the acknowledgement.

        One batch at a time is between the device and the disk, prefixes first. Its copies are the
        first that the host gives up afterwards, so that it costs the host no more than a batch.
        """
        under_way = [self.core.node_by_id(node_id) for node_id, _ in cache.ongoing_backup.values()]
        room = self._batch() - sum(len(node.key) for node in under_way)
        while self._for_disk and room > 0:
            node = next(iter(self._for_disk))
            if self._is_written(node) or node.evicted:
                del self._for_disk[node]
                continue
            while node.parent.parent is not None and not self._is_written(node.parent):
                node = node.parent
            self._for_disk.pop(node, None)
            if node.backuped:
                cache.write_backup_storage(node.id)
                room -= len(node.key)
                continue
            copied = self._copy_for_disk(cache, node)
            self.counts.for_disk += copied
            room -= copied

    def _is_written(self, node: UnifiedTreeNode) -> bool:
        """Whether the disk has ``node``, or is to get it at an acknowledgement on its way."""
        return node.canopy.on_disk or node.write_through_pending_id is not None

    def _copy_for_disk(self, cache: UnifiedRadixCache, node: UnifiedTreeNode) -> int:
        """Start copying ``node``; returns its tokens, 0 if the host has no room for so many."""
        assert cache.cache_controller is not None
        pool = cache.cache_controller.mem_pool_host
        short = len(node.key) - pool.available_size()
        if short > 0:
            cache._apply_eviction_result(self.core.give_up_copies(short))
        return self._copy(cache, node) if len(node.key) <= pool.size // 2 else 0

    # ---- what happens to the tree ----

    def choose(self, node: UnifiedTreeNode, keep: int) -> tuple[UnifiedTreeNode, int]:
        """The victim to take where the policy names ``node``: one whose copy is there, if any is.

        The window is of the lowest ranks, so that none is taken far out of its turn.
        """
        if node.backuped or self.size is None:
            return node, keep
        self._missed = True
        leaves = self.core.evictable_device_leaves
        for other in self._window:
            if other in leaves and other.backuped:
                self.counts.passed_over += 1
                return other, 0
        self.waited()
        return node, keep

    def waited(self) -> None:
        """An eviction waits: for its own copy, or for those in flight."""
        self.counts.stalls += 1
        if self.size is not None:
            self.size.waited()

    def spares(self, node: UnifiedTreeNode) -> bool:
        """Whether the host is to give up other copies before that of ``node``."""
        return node in self._window

    def split(self, node: UnifiedTreeNode, head: UnifiedTreeNode) -> None:
        """``head`` holds the first tokens of ``node`` now."""
        head.canopy.copied_ahead = node.canopy.copied_ahead
        for nodes in (self._window, self._for_disk):
            if node in nodes:
                nodes[head] = None

    def used_again(self, node: UnifiedTreeNode) -> None:
        """A request used ``node``: it is no longer among the next to go."""
        if node in self._window:
            del self._window[node]
            self._covered -= len(node.key)

    def awaited(self, node: UnifiedTreeNode) -> None:
        """A request that waits will use the path to ``node``."""
        while node.parent is not None:
            self.used_again(node)
            node = node.parent

    def left_device(self, node: UnifiedTreeNode) -> None:
        """``node`` was evicted from the device."""
        if self.size is not None:
            self.size.evicted(len(node.key))
        self.used_again(node)
        if node.canopy.copied_ahead:
            self.counts.used += len(node.key)
            node.canopy.copied_ahead = False

    def left_host(self, node: UnifiedTreeNode) -> None:
        """The host gave up its copy of ``node``, which the device still has."""
        self.used_again(node)
        if node.canopy.copied_ahead:
            self.counts.wasted += len(node.key)
            node.canopy.copied_ahead = False

    def gone(self, node: UnifiedTreeNode) -> None:
        """``node`` is no longer in the tree."""
        self.left_host(node)
        self._for_disk.pop(node, None)
