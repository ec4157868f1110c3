"""What the tree tells the disk tier of its pages, and what it takes back with them.

Runs on the scheduler thread; ``pages.PAGES`` carries everything to and from the storage's own
threads. Times there are seconds since 1970, so that they still mean something after a restart;
the tree's are the requests' own. The difference (``epoch``) travels with the requests, so all
ranks compute the same.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang_canopy.disk.page import PageMeta
from sglang_canopy.radix.leaf import NodeLeaf, measure
from sglang_canopy.records import Request
from sglang_canopy.request.fields import MAX_KEEP_S
from sglang_canopy.storage.agreement import first_ranks, runs_of
from sglang_canopy.storage.disk_retry import DiskRetry
from sglang_canopy.storage.page_table import PAGES

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    from sglang_canopy.radix.core import CanopyTreeCore
    from sglang_canopy.radix.live_request import LiveRequest
    from sglang_canopy.ttl.table import TTLTable

TELL_S = 1.0
"""A node in use is told to the disk tier at most once in so many seconds."""
_says = operator.attrgetter(*(f.name for f in dataclasses.fields(PageMeta)[2:]))
"""All of a page's record but where it is: its fields after ``offset`` and ``tokens``."""


class DiskLink:
    """The tree's side of the talk with the disk tier; does nothing without one of ours."""

    def __init__(self, core: CanopyTreeCore) -> None:
        self.core = core
        self.cache: UnifiedRadixCache | None = None
        """Set by the cache once both exist."""
        self.active = False
        """Whether the storage backend is ours; looked up at every arrival."""
        self.epoch = 0.0
        """Seconds since 1970 when the requests' clock was 0."""
        self._dirty: dict[UnifiedTreeNode, None] = {}
        self._told_at = float("-inf")
        self.retry = DiskRetry(self)

    def arrive(self, epoch: float) -> None:
        """A request came in: what was used since the last time is told now."""
        self.active = getattr(self._backend(), "pages", None) is PAGES
        self.epoch = epoch
        if self.active:
            self.retry.arrive()
        if not self._dirty:
            return
        if not self.active:
            self._dirty.clear()
        elif self.core.clock - self._told_at >= TELL_S:
            self._told_at = self.core.clock
            arena = self.core._node_arena
            for node in self._dirty:
                if arena.get(node.id) is node:
                    self._tell(node)
            self._dirty.clear()

    def forget(self) -> None:
        """The tree is being reset. What is on disk stays there."""
        self._dirty.clear()
        self.retry.forget()

    def room(self) -> tuple[int, float] | None:
        """Bytes the disk tier may hold and bytes a token takes there; ``None`` without one."""
        store = self._backend().store if self.active else None
        if store is None:
            return None
        return store.capacity_bytes, store.content.page_bytes / self.core.page_size

    def set_ttl(self, table: TTLTable) -> None:
        """From now on the disk tier keeps pages for as long as ``table`` says."""
        if self.active:
            self._backend().set_ttl(table)

    def not_there_yet(self, node: UnifiedTreeNode) -> list[UnifiedTreeNode]:
        """Nodes above ``node`` that the disk tier never got, shallowest first.

        Under ``write_back`` SGLang copies down what it evicts, tails before heads; the disk tier
        keeps no page without its prefix. So the prefix is copied along, once. Its copies on the
        host are the first to go when room is needed there.
        """
        pool = self.cache.cache_controller.mem_pool_host  # type: ignore[union-attr]
        room = pool.size // 2 - len(node.key)
        above: list[UnifiedTreeNode] = []
        node = node.parent
        while node is not self.core.root_node and not self.retry.there(node.canopy):
            room -= len(node.key)
            if room < 0 or node.backuped or node.evicted:
                break
            above.append(node)
            node = node.parent
        return above[::-1]

    def note(self, node: UnifiedTreeNode) -> None:
        """``node`` is about to be written to the disk tier: say what its pages are."""
        if not self.active or not node.hash_value:
            return
        if node.canopy.told > float("-inf"):
            self._dirty.pop(node, None)  # its request is done: there is nothing to add later
        self._note(node)

    def note_staged(self, node: UnifiedTreeNode) -> None:
        """Like ``note``, for a node that SGLang may look at many times before it writes it."""
        if self.active and node.hash_value and not self.retry.there(node.canopy):
            self._note(node)

    def _note(self, node: UnifiedTreeNode) -> None:
        keys = node.hash_value
        measure(node)
        leaf, page = node.canopy, self.core.page_size
        self.retry.offered(leaf)
        common = _says(self._meta(leaf))
        metas = [
            PageMeta(leaf.offset + i * page, page, *common)  # fields in order: offset, tokens, ...
            for i in range(len(keys))
        ]
        PAGES.note(keys, metas, [node.parent.get_last_hash_value(), *keys[:-1]])

    def used(self, node: UnifiedTreeNode) -> None:
        """A finished request used ``node``: the copy on disk is to stay as fresh as this one."""
        leaf = node.canopy
        if not node.hash_value:
            return
        self.retry.used(node)
        if self.core.clock - leaf.told >= TELL_S:
            self._tell(node)
            if leaf.hits > 1:
                return
        # In use all the time; or new, and perhaps not written yet: (again) a little later.
        self._dirty[node] = None

    def finished(self, request: LiveRequest) -> None:
        """Let the disk tier's policy learn from a request that is done."""
        if self.active and self.core.live.disk_learns:
            blocks = request.prompt_tokens // request.block_tokens
            PAGES.announce("arrive", self._copy(request, blocks))
            PAGES.announce("finish", self._copy(request, len(request.path)))

    def came_back(self, node_id: int | None, hashes: Sequence[str]) -> None:
        """Pages ``hashes`` were read; ``node_id`` is the deepest node that now holds them.

        A node made for them gets what was stored of them, and is split where its pages differ.
        """
        if not self.active:
            return
        metas = self._agreed(PAGES.take(hashes))
        if node_id is None:
            return
        node = self.core.node_by_id(node_id)
        if node.canopy.hits or not node.hash_value:
            return
        measure(node)
        runs = runs_of(metas[-len(node.hash_value) :])
        page = self.core.page_size
        for pages, meta in runs[:-1]:
            head, action = self.core._split_node(node.key, node, pages * page)
            assert action is None, action  # nothing is copied from a node that just came
            self._restore(head.canopy, meta)
            self.retry.was_read(head.canopy)
        self._restore(node.canopy, runs[-1][1])
        self.retry.was_read(node.canopy)

    # ---- in and out of seconds since 1970 ----

    def _meta(self, leaf: NodeLeaf) -> PageMeta:
        meta = PageMeta.from_leaf(leaf, offset=leaf.offset, tokens=leaf.length, ttl_s=leaf.ttl_s)
        epoch, pin = self.epoch, leaf.pin_until
        if pin is not None and (meta.keep_until is None or pin > meta.keep_until):
            meta.keep_until = pin
        meta.created += epoch
        meta.last_access += epoch
        if meta.keep_until is not None:
            meta.keep_until += epoch
        if meta.return_at is not None:
            meta.return_at += epoch
        return meta

    def _restore(self, leaf: NodeLeaf, meta: PageMeta | None) -> None:
        if meta is None or meta.hits < 1:
            return  # it takes its parent's attributes when the policy hears of it
        meta.apply_to(leaf)
        now, epoch = self.core.clock, self.epoch
        leaf.ttl_s = meta.ttl_s
        leaf.last_access = min(leaf.last_access - epoch, now)
        leaf.created = min(leaf.created - epoch, leaf.last_access)
        if leaf.keep_until is not None:
            # A pin is for the disk: above it, nothing is kept for longer than a client may ask.
            leaf.pin_until = leaf.keep_until - epoch
            leaf.keep_until = None
            until = min(leaf.pin_until, leaf.last_access + MAX_KEEP_S)
            self.core.keep(leaf.node, until, leaf.tenant)
        if leaf.return_at is not None:
            leaf.return_at -= epoch

    def _copy(self, request: LiveRequest, blocks: int) -> Request:
        """``request`` as it is now, for another thread, at the disk tier's time."""
        epoch = self.epoch
        return Request(
            time=request.time + epoch,
            category=request.category,
            path=tuple(request.path[:blocks]),
            block_tokens=request.block_tokens,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            turn=request.turn,
            conversation=request.conversation,
            stop=request.stop,
            tenant=request.tenant,
            slo_ms=request.slo_ms,
            over=request.over,
            return_in_s=request.return_in_s,
            keep_until=None if request.keep_until is None else request.keep_until + epoch,
            ttft_model=request.ttft_model,
            cached_tokens=request.cached_tokens,
        )

    # ---- telling ----

    def _backend(self) -> Any:
        return getattr(getattr(self.cache, "cache_controller", None), "storage_backend", None)

    def _tell(self, node: UnifiedTreeNode) -> None:
        keys = node.hash_value
        if not keys:
            return
        node.canopy.told = self.core.clock
        if PAGES.of(keys[0]) is not None:
            self._note(node)  # not written yet: it is to be written as it is now
        PAGES.used(keys, self._meta(node.canopy))

    def _agreed(self, metas: list[PageMeta | None]) -> list[PageMeta | None]:
        """What every rank is to use of its records: the first rank's, and differences counted.

        Pipeline stages do without: they act on one read at different times, and cannot stop to
        compare.
        """
        cache = self.cache
        if cache is None:
            return metas
        if cache.pp_size > 1:
            return [None] * len(metas)
        if cache.tp_world_size <= 1:
            return metas
        metas, agreed = first_ranks(metas, cache)
        self.core.counters.records_compared += 1
        self.core.counters.records_disagreed += not agreed
        return metas
