"""SGLang's own fixtures for its unified cache (``sglang.test.kits``), over Canopy's core: full attention,
sliding windows, recurrent states or both, on small real pools of CPU tensors.

The kit builds SGLang's cache, core and component; ``_on_canopy`` puts ours in their place, so that a test can
run on both. Our core also derives from the kit's inspector, which reads private state.
"""

import dataclasses
import functools
import json
import unittest
from array import array
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InsertParams,
    TreeLock,
)
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs
from sglang.test.kits.unified_radix_cache import config, fixtures, mixins
from sglang.test.kits.unified_radix_cache.unified_tree_core_inspector import (
    UnifiedTreeCoreInspector,
)

from sglang_canopy.radix.cache import CanopyRadixCache
from sglang_canopy.radix.core import CanopyTreeCore
from sglang_canopy.radix.live_request import LiveRequest, extend_path
from sglang_canopy.server.scheduler.cache_factory import install_core, prepare_params
from support.disk_tree import FIRST_RANK, disk_settings
from support.evictable_recount import recount_core

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
HOST_POOLS = {FULL: PoolName.KV, SWA: PoolName.SWA, MAMBA: PoolName.MAMBA}
FULL_CONFIGS = [each for each in config.CONFIGS if each.components == (FULL,)]
CORE_NAMES = ("sglang", "canopy-lru", "wa", "threshold-lru")


def _small(*components: ComponentType, page_size: int = 1, window: int = 0) -> config.CacheConfig:
    state_options = {"mamba_cache_size": 6, "enable_mamba_extra_buffer": page_size > 1}
    options: dict[str, Any] = state_options if MAMBA in components else {}
    if window:
        options["sliding_window_size"] = window
    return config.CacheConfig(
        page_size=page_size, components=(FULL, *components), kv_size=48 if page_size == 1 else 96, num_layers=4,
        full_attention_layer_ids=(3,), head_num=1, head_dim=8, **options,
    )  # fmt: skip


HYBRIDS = {
    "mamba": _small(MAMBA),
    "mamba-pages": _small(MAMBA, page_size=4),
    "swa": _small(SWA, window=4),
    "swa-pages": _small(SWA, page_size=4, window=6),
    "both": _small(SWA, MAMBA, window=4),
}


class CanopyInspector(UnifiedTreeCoreInspector, CanopyTreeCore):
    """Canopy's core with the kit's inspection methods."""


def _canopy_cache(params: Any) -> CanopyRadixCache:
    install_core()
    params.eviction_policy_config = {}
    prepare_params(params, floor=True)
    params.tree_core_backend = None  # the kit has put the inspector where "python" is
    return CanopyRadixCache(params=params)


def _on_canopy(core: str) -> Any:
    """Return a context in which the kit's ``build_fixture`` builds Canopy's cache, or SGLang's own."""
    return mock.patch.multiple(
        fixtures,
        UnifiedRadixCache=UnifiedRadixCache if core == "sglang" else _canopy_cache,
        UnifiedTreeCoreInspector=UnifiedTreeCoreInspector if core == "sglang" else CanopyInspector,
    )


def _cpu_server_args(server_fields: dict[str, Any], **arguments: Any) -> ServerArgs:
    if "hicache_io_backend" in arguments:
        arguments |= {"hicache_io_backend": "direct", "hicache_mem_layout": "page_first_direct"}
    return ServerArgs(**arguments | server_fields)


class KitTree:
    """One of the kit's fixtures and its steps.

    ``cache_config``: the kit's, or a key of ``HYBRIDS``; ``changes`` replace its fields. ``core``: ``sglang`` or a
    policy's name. ``write_policy``: of a host tier of ``host_ratio`` times the device; ``None``: without one.
    """

    def __init__(
        self,
        cache_config: config.CacheConfig | str,
        core: str = "canopy-lru",
        write_policy: str | None = None,
        host_ratio: float = 2.0,
        step_class: type = mixins.UnifiedRadixCacheFixtures,
        **changes: Any,
    ) -> None:
        if core != "sglang":
            changes["eviction_policy"] = core
        if isinstance(cache_config, str):
            cache_config = HYBRIDS[cache_config]
        cache_config = dataclasses.replace(cache_config, **changes)
        methods = {"runTest": lambda self: None}
        self.kit_steps = type("Steps", (step_class, unittest.TestCase), methods)()
        self.kit_steps.cfg = self.cache_config = cache_config
        with _on_canopy(core):
            self.cache, self.allocator, self.pool = fixtures.build_fixture(cache_config)
        self.core = self.cache.tree_core
        self.has_swa, self.has_mamba = cache_config.has_swa, cache_config.has_mamba
        self.write_policy = write_policy
        if write_policy is not None:
            self.add_host_tier({"hicache_ratio": host_ratio}, write_policy=write_policy)
            self.cache.write_through_threshold = 1

    def close(self) -> None:
        self.kit_steps.doCleanups()

    def add_host_tier(self, server_fields: dict[str, Any], **options: Any) -> None:
        from canopy_cpu import install

        install()
        HookRegistry.apply_hooks()
        make_args = functools.partial(_cpu_server_args, server_fields)
        with mock.patch.object(mixins, "ServerArgs", make_args):
            self.kit_steps._init_hicache(self.cache, **options)

    def add_host_buffer(self, folder: str, backend: str) -> None:
        """``--hicache-host-memory-mode buffer_only`` above SGLang's file storage, or our disk."""
        options = {"host_memory_mode": "buffer_only", "storage_backend": "file"}
        options |= {"storage_dir": folder, "prefetch_threshold": 1}
        rank_numbers = get_parallel().override(**FIRST_RANK)
        rank_numbers.__enter__()
        self.kit_steps.addCleanup(rank_numbers.__exit__, None, None, None)
        if backend == "file":
            self.add_host_tier({}, **options)
        else:
            extra = json.dumps(disk_settings(folder))
            self.add_host_tier(
                {
                    "hicache_storage_backend": "dynamic",
                    "hicache_storage_backend_extra_config": extra,
                },
                **options,
            )
            self.kit_steps.addCleanup(self.cache.cache_controller.storage_backend.close)

    def settle(self) -> None:
        """Wait for copies between the tiers."""
        if self.write_policy is not None:
            self.cache.writing_check(write_back=True)
            self.cache.loading_check()

    def fetch(self, tokens: list[int]) -> int:
        """Read a path's pages from the storage. Return the tokens then on the device."""
        handle = CacheRequestHandle("fetch", 0)
        root = self.cache.root_node_handle()
        self.cache.prefetch_from_storage(handle, root, array("q", tokens), None, None)
        self.kit_steps._run_prefetch_to_completion(self.cache, handle)
        return self.match(tokens).device_prefix_len

    def load_back(self, tokens: list[int]) -> int:
        """Load a path to the device, as on admission. Return the loaded tokens."""
        match = self.match(tokens)
        swa_hit, mamba_hit = match.swa_host_hit_length, match.mamba_host_hit_length
        if not (match.host_hit_length or swa_hit or mamba_hit):
            return 0
        needed_slots = 4 if self.cache_config.enable_mamba_extra_buffer else 2
        if self.has_mamba and self.available_slots(MAMBA) < needed_slots:
            return 0  # the request's own, and the node's
        req = self.kit_steps._load_back_through_admission(self.cache, self.pool, tokens)
        self.cache.ready_to_load_host_cache()
        for ack in list(self.cache.cache_controller.ack_load_queue):
            ack.finish_event.synchronize()
        self.cache.loading_check()
        if self.has_mamba:
            self.pool.free_mamba_cache(req)
        self.pool.free(req)
        return self.match(tokens).device_prefix_len - match.device_prefix_len

    def insert(self, tokens: list[int]) -> Any:
        return self.kit_steps._insert(self.cache, self.allocator, self.pool, tokens)

    def match(self, tokens: list[int]) -> Any:
        return fixtures.match_prefix(self.cache, tokens)

    def obtainable_tokens(self) -> int:
        """Return the tokens that are free or evictable."""
        return min(
            self.available_slots(FULL) + self.core.full_evictable_size(),
            self.available_slots(SWA) + self.core.swa_evictable_size() if self.has_swa else 1 << 30,
        )

    def serve(self, tokens: list[int], time: float = 0.0, **fields: Any) -> int:
        """Look up, make room, insert with a state at the end. Returns the tokens hit."""
        is_canopy = isinstance(self.core, CanopyTreeCore)
        request = LiveRequest(time=time, prompt_tokens=len(tokens), **fields) if is_canopy else None
        if request is not None:
            request.block_tokens = self.cache_config.page_size
            request.path = []
            extend_path(request, tokens)
            self.core.requests.arrive(request)
        hit_tokens = self.match(tokens).device_prefix_len
        if request is not None:
            request.cached_tokens = hit_tokens
            self.core.requests.finish(request)
        prompt_tokens = len(tokens)
        # SGLang evicts the missing tokens of each component.
        self.evict(
            full=prompt_tokens - self.available_slots(FULL),
            swa=prompt_tokens - self.available_slots(SWA) if self.has_swa else 0,
            mamba=1 - self.available_slots(MAMBA) if self.has_mamba else 0,
        )
        slots = self.kit_steps._alloc(self.allocator, prompt_tokens)
        params = InsertParams(key=RadixKey(array("q", tokens)), value=slots)
        if self.has_mamba:
            params.mamba_value = self.pool.mamba_allocator.alloc(1)
            assert params.mamba_value is not None
        params.canopy = request
        result = self.cache.insert(params)
        if self.has_mamba and result.mamba_exist:
            self.pool.mamba_allocator.free(params.mamba_value)
        self.settle()
        return hit_tokens

    def lock(self, tokens: list[int], skips_state: bool = False) -> TreeLock | None:
        node = self.match(tokens).last_device_node
        if self.core.is_root(node):
            return None
        skipped = (MAMBA,) if skips_state and self.has_mamba else ()
        return self.cache.lock(node, skip_lock_components=skipped)

    def evict(self, full: int = 0, swa: int = 0, mamba: int = 0) -> None:
        full, swa, mamba = (max(slots, 0) for slots in (full, swa, mamba))
        if full or swa or mamba:
            self.cache.evict(EvictParams(num_tokens=full, swa_num_tokens=swa, mamba_num=mamba))
        self.settle()

    def available_slots(self, component: ComponentType) -> int:
        return self.cache._component_available_size(component)

    def nodes(self) -> list[Any]:
        return [node for node in self.core._node_arena.values() if node is not self.core.root_node]

    def slots(self, component: ComponentType, of_node=fixtures.node_device_value) -> list[int]:
        """Return every slot of ``component`` that a node holds on the device, or in host memory with ``node_host_value``."""
        slot_tensors = (of_node(self.cache, node.id, component) for node in self.nodes())
        slots = [slot for tensor in slot_tensors if tensor is not None for slot in tensor.tolist()]
        assert len(slots) == len(set(slots)), f"one slot of {component} in two nodes"
        return slots

    def recount(self, sanity_check: Any = None) -> None:
        """Check that every slot of every pool is free or in one node, and recount the leaf sets."""
        config = self.cache_config
        pool_slots = {FULL: config.kv_size, SWA: config.kv_size, MAMBA: config.mamba_cache_size}
        for component in config.components:
            used_slots = len(self.slots(component))
            assert used_slots + self.available_slots(component) == pool_slots[component], component
            if self.cache.cache_controller is not None:
                pool = self.cache.host_pool_group.get_pool(HOST_POOLS[component])
                host_slots = self.slots(component, fixtures.node_host_value)
                assert len(host_slots) + pool.available_size() == pool.size, component
        recount_core(self.core)
        (sanity_check or self.cache.sanity_check)()


@pytest.fixture
def kit_tree() -> Iterator[Any]:
    """``kit_tree(cache_config, core, ...)``: a ``KitTree``, closed after the test."""
    trees: list[KitTree] = []

    def build(*arguments: Any, **options: Any) -> KitTree:
        trees.append(KitTree(*arguments, **options))
        return trees[-1]

    yield build
    for tree in trees:
        tree.close()
