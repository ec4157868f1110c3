"""SGLang's cache with sliding windows, recurrent states or both, on small real pools of CPU tensors."""

import dataclasses
import itertools
from array import array
from typing import Any
from unittest import mock

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, TreeLock
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.test.kits.unified_radix_cache import config, fixtures, mixins

from sglang_canopy.radix.core import CanopyTreeCore
from sglang_canopy.radix.live_request import LiveRequest, extend_path
from support.evictable_recount import recount_leaves, recount_protected
from support.kit_tree import KitTree, _cpu_server_args, on_canopy

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
HOST_POOLS = {FULL: PoolName.KV, SWA: PoolName.SWA, MAMBA: PoolName.MAMBA}
_SMALL = {"num_layers": 4, "full_attention_layer_ids": (3,), "head_num": 1, "head_dim": 8}
HYBRIDS = {
    "mamba": config.CacheConfig(components=(FULL, MAMBA), kv_size=48, mamba_cache_size=6, **_SMALL),
    "mamba-pages": config.CacheConfig(
        page_size=4,
        components=(FULL, MAMBA),
        enable_mamba_extra_buffer=True,
        kv_size=96,
        mamba_cache_size=6,
        **_SMALL,
    ),
    "swa": config.CacheConfig(components=(FULL, SWA), sliding_window_size=4, kv_size=48, **_SMALL),
    "swa-pages": config.CacheConfig(
        page_size=4, components=(FULL, SWA), sliding_window_size=6, kv_size=96, **_SMALL
    ),
    "both": config.CacheConfig(
        components=(FULL, SWA, MAMBA),
        sliding_window_size=4,
        kv_size=48,
        mamba_cache_size=6,
        **_SMALL,
    ),
}
_states = itertools.count()


class HybridTree(KitTree):
    """``core``: ``sglang``, or a Canopy policy's name.

    ``write``: the write policy of a host tier of ``host_ratio`` times the device; ``None``: no such.
    """

    def __init__(
        self,
        kind: str,
        core: str = "canopy-lru",
        write: str | None = None,
        host_ratio: float = 2.0,
        **changes: Any,
    ) -> None:
        with on_canopy(core, {}):
            super().__init__(dataclasses.replace(HYBRIDS[kind], **changes), core)
        self.core = self.cache.tree_core
        self.has_swa, self.has_mamba = self.cfg.has_swa, self.cfg.has_mamba
        self.write = write
        if write is not None:

            def server_args(**given: Any) -> Any:
                return _cpu_server_args(**given, hicache_ratio=host_ratio)

            with mock.patch.object(mixins, "ServerArgs", server_args):
                self.add_host_tier(write_policy=write)
            self.cache.write_through_threshold = 1

    def close(self) -> None:
        self.steps.doCleanups()

    def settle(self) -> None:
        """Wait for copies between the tiers."""
        if self.write is not None:
            self.cache.writing_check(write_back=True)
            self.cache.loading_check()

    def load_back(self, tokens: list[int]) -> int:
        """Load a path to the device, as on admission. Return the loaded tokens."""
        before = self.match(tokens)
        windows, states = before.swa_host_hit_length, before.mamba_host_hit_length
        if not (before.host_hit_length or windows or states):
            return 0
        slots = 4 if self.cfg.enable_mamba_extra_buffer else 2
        if self.has_mamba and self.available(MAMBA) < slots:
            return 0  # the request's own, and the node's
        req = self.steps._load_back_through_admission(self.cache, self.pool, tokens)
        self.cache.ready_to_load_host_cache()
        for ack in list(self.cache.cache_controller.ack_load_queue):
            ack.finish_event.synchronize()
        self.cache.loading_check()
        if self.has_mamba:
            self.pool.free_mamba_cache(req)
        self.pool.free(req)
        return self.match(tokens).device_prefix_len - before.device_prefix_len

    # ---- the few steps that a scheduler takes ----

    def room(self) -> int:
        """Tokens that can be had, cached ones counted."""
        return min(
            self.available(FULL) + self.core.full_evictable_size(),
            self.available(SWA) + self.core.swa_evictable_size() if self.has_swa else 1 << 30,
        )

    def serve(self, tokens: list[int], time: float = 0.0, **fields: Any) -> int:
        """Look up, make room, insert with a state at the end. Returns the tokens hit."""
        own = isinstance(self.core, CanopyTreeCore)
        request = LiveRequest(time=time, prompt_tokens=len(tokens), **fields) if own else None
        if request is not None:
            request.block_tokens = self.cfg.page_size
            request.path = []
            extend_path(request, tokens)
            self.core.requests.arrive(request)
        hit = self.match(tokens).device_prefix_len
        if request is not None:
            request.cached_tokens = hit
            self.core.requests.finish(request)
        need = len(tokens)
        # SGLang evicts the missing tokens of each kind.
        self.evict(
            full=need - self.available(FULL),
            swa=need - self.available(SWA) if self.has_swa else 0,
            mamba=1 - self.available(MAMBA) if self.has_mamba else 0,
        )
        params = InsertParams(
            key=RadixKey(array("q", tokens)), value=self.steps._alloc(self.allocator, need)
        )
        if self.has_mamba:
            params.mamba_value = self.pool.mamba_allocator.alloc(1)
            assert params.mamba_value is not None
        self.core.inserting = request
        result = self.cache.insert(params)
        self.core.inserting = None
        if self.has_mamba and result.mamba_exist:
            self.pool.mamba_allocator.free(params.mamba_value)
        self.settle()
        return hit

    def lock(self, tokens: list[int], without_state: bool = False) -> TreeLock | None:
        node = self.match(tokens).last_device_node
        if self.core.is_root(node):
            return None
        skipped = (MAMBA,) if without_state and self.has_mamba else ()
        return self.cache.lock(node, skip_lock_components=skipped)

    def evict(self, full: int = 0, swa: int = 0, mamba: int = 0) -> None:
        if max(full, swa, mamba) > 0:
            self.cache.evict(
                EvictParams(
                    num_tokens=max(full, 0), swa_num_tokens=max(swa, 0), mamba_num=max(mamba, 0)
                )
            )
        self.settle()

    # ---- what there is ----

    def available(self, kind: ComponentType) -> int:
        return self.cache._component_available_size(kind)

    def nodes(self) -> list[Any]:
        return [n for n in self.core._node_arena.values() if n is not self.core.root_node]

    def values(self, kind: ComponentType) -> list[int]:
        """Every slot of ``kind`` that a node holds."""
        held = (fixtures.node_device_value(self.cache, n.id, kind) for n in self.nodes())
        return [slot for value in held if value is not None for slot in value.tolist()]

    def recount(self, sanity_check: Any = None) -> None:
        """Check that every slot of every pool is free or in one node, and recount the leaf sets."""
        sizes = {FULL: self.cfg.kv_size, SWA: self.cfg.kv_size, MAMBA: self.cfg.mamba_cache_size}
        for kind in self.cfg.components:
            slots = self.values(kind)
            assert len(slots) == len(set(slots)), f"one slot of {kind} in two nodes"
            assert len(slots) + self.available(kind) == sizes[kind], kind
        if self.write is not None:
            for kind in self.cfg.components:
                self._recount_host(kind)
        core = self.core
        self._recount_leaves(core.evictable_device_leaves, core._is_device_leaf)
        self._recount_leaves(core.evictable_host_leaves, core._is_host_leaf)
        if isinstance(self.core, CanopyTreeCore):
            recount_protected(self.core)
            for node in self.nodes():
                leaf = node.canopy
                assert leaf.node is node
                if leaf.length:
                    assert leaf.length == len(node.key)
                    assert leaf.offset == node.parent.canopy.offset + node.parent.canopy.length
        (sanity_check or self.cache.sanity_check)()

    def _recount_host(self, kind: ComponentType) -> None:
        pool = self.cache.host_pool_group.get_pool(HOST_POOLS[kind])
        held = (fixtures.node_host_value(self.cache, node.id, kind) for node in self.nodes())
        slots = [slot for value in held if value is not None for slot in value.tolist()]
        assert len(slots) == len(set(slots)), f"one host slot of {kind} in two nodes"
        assert len(slots) + pool.available_size() == pool.size, kind

    def _recount_leaves(self, leaves: Any, is_leaf: Any) -> None:
        truth = {node for node in self.nodes() if is_leaf(node)}
        assert set(leaves) == truth
        if isinstance(self.core, CanopyTreeCore):
            recount_leaves(leaves, truth)
