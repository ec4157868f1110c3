"""SGLang's own fixtures for its unified cache (``sglang.test.kits``), over Canopy's core.

The kit builds SGLang's cache, core and component; ``on_canopy`` puts ours in their place, so
that a test can run on both. White-box access is the kit's inspector, mixed into our core.
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
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
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
from sglang_canopy.server.scheduler.cache_factory import install_core, prepare
from sglang_canopy.storage.settings import DYNAMIC_BACKEND
from support.disk_tree import _RANKS

FULL = ComponentType.FULL
FULL_CONFIGS = [c for c in config.CONFIGS if c.components == (FULL,)]
CORES = ("sglang", "canopy-lru", "wa", "threshold-lru")


class CanopyInspector(UnifiedTreeCoreInspector, CanopyTreeCore):
    """Canopy's core with the kit's white-box methods."""


def _canopy_cache(params: Any, config: dict[str, Any] | None = None) -> CanopyRadixCache:
    install_core()
    params.eviction_policy_config = config
    prepare(params, floor=True)
    params.tree_core_backend = None  # the kit has put the inspector where "python" is
    return CanopyRadixCache(params=params)


def _cpu_server_args(**given: Any) -> ServerArgs:
    if "hicache_io_backend" in given:
        given |= {"hicache_io_backend": "direct", "hicache_mem_layout": "page_first_direct"}
    return ServerArgs(**given)


class KitTree:
    """One of the kit's fixtures and its steps; ``core`` is ``sglang`` or a Canopy policy."""

    def __init__(self, cfg: config.CacheConfig, core: str, steps: type = object) -> None:
        suite = steps if steps is not object else mixins.UnifiedRadixCacheFixtures
        self.steps = type("Steps", (suite, unittest.TestCase), {"runTest": lambda self: None})()
        self.steps.cfg = self.cfg = (
            cfg if core == "sglang" else dataclasses.replace(cfg, eviction_policy=core)
        )
        self.cache, self.allocator, self.pool = fixtures.build_fixture(self.cfg)

    def insert(self, tokens: list[int]) -> Any:
        return self.steps._insert(self.cache, self.allocator, self.pool, tokens)

    def match(self, tokens: list[int]) -> Any:
        return fixtures.match_prefix(self.cache, tokens)

    def add_host_tier(self, **options: Any) -> None:
        from canopy_cpu import install

        install()
        HookRegistry.apply_hooks()
        self.steps._init_hicache(self.cache, **options)

    def add_host_buffer(self, folder: str, backend: str) -> None:
        """``--hicache-host-memory-mode buffer_only`` above SGLang's file storage, or our disk."""
        options = {"host_memory_mode": "buffer_only", "storage_backend": "file"}
        options |= {"storage_dir": folder, "prefetch_threshold": 1}
        extra = {"path": folder, "capacity_bytes": 10**8, "policy": "canopy-lru", "sweep_s": 3600}
        ours = {"hicache_storage_backend": "dynamic"}
        ours["hicache_storage_backend_extra_config"] = json.dumps(
            {**extra, **DYNAMIC_BACKEND, "prefetch_threshold": 1}
        )
        ranks = get_parallel().override(**dict.fromkeys(_RANKS, 0))
        ranks.__enter__()
        self.steps.addCleanup(ranks.__exit__, None, None, None)
        if backend == "file":
            self.add_host_tier(**options)
        else:
            with mock.patch.object(mixins, "ServerArgs", lambda **g: _cpu_server_args(**g | ours)):
                self.add_host_tier(**options)
            self.steps.addCleanup(self.cache.cache_controller.storage_backend.close)

    def fetch(self, tokens: list[int]) -> int:
        """Read a path's pages from the storage. Return the tokens then on the device."""
        handle = CacheRequestHandle("fetch", 0)
        self.cache.prefetch_from_storage(
            handle, self.cache.root_node_handle(), array("q", tokens), None, None
        )
        self.steps._run_prefetch_to_completion(self.cache, handle)
        return self.match(tokens).device_prefix_len

    def load_back(self, tokens: list[int]) -> int:
        """Load a path to the device, as on admission. Return the loaded tokens."""
        before = self.match(tokens)
        if before.host_hit_length == 0 or self.allocator.available_size() < before.host_hit_length:
            return 0
        self.steps._load_back_through_admission(self.cache, self.pool, tokens)
        self.pool.clear()
        self.cache.ready_to_load_host_cache()
        for ack in list(self.cache.cache_controller.ack_load_queue):
            ack.finish_event.synchronize()
        self.cache.loading_check()
        return self.match(tokens).device_prefix_len - before.device_prefix_len

    def recount(self, sanity_check: Any = None) -> None:
        """Every slot of both pools is free or in exactly one node."""
        core, allocator = self.cache.tree_core, self.allocator
        nodes = [n for n in core.get_all_node_ids() if n != self.cache.root_node_handle()]
        values = [fixtures.node_device_value(self.cache, n, FULL) for n in nodes]
        slots = [slot for value in values if value is not None for slot in value.tolist()]
        assert len(slots) == len(set(slots)), "one device slot in two nodes"
        assert len(slots) + allocator.available_size() == allocator.size
        controller = self.cache.cache_controller
        if controller is not None:
            values = [fixtures.node_host_value(self.cache, n, FULL) for n in nodes]
            slots = [slot for value in values if value is not None for slot in value.tolist()]
            assert len(slots) == len(set(slots)), "one host slot in two nodes"
            host = controller.mem_pool_host
            assert len(slots) + host.available_size() == host.size
        (sanity_check or self.cache.sanity_check)()


@pytest.fixture
def kit_tree(request: pytest.FixtureRequest) -> Iterator[Any]:
    """``kit_tree(cfg, core, steps)``: a ``KitTree``, cleaned up after the test."""
    made: list[KitTree] = []
    with mock.patch.object(mixins, "ServerArgs", _cpu_server_args):

        def build(cfg: config.CacheConfig, core: str, steps: type = object) -> KitTree:
            with on_canopy(core):
                made.append(KitTree(cfg, core, steps))
            return made[-1]

        yield build
        for tree in made:
            tree.steps.doCleanups()


def on_canopy(core: str, settings: dict[str, Any] | None = None) -> Any:
    """While this is entered, the kit's ``build_fixture`` builds ours (or SGLang's own)."""
    ours = functools.partial(_canopy_cache, config=settings)
    return mock.patch.multiple(
        fixtures,
        UnifiedRadixCache=UnifiedRadixCache if core == "sglang" else ours,
        UnifiedTreeCoreInspector=UnifiedTreeCoreInspector if core == "sglang" else CanopyInspector,
    )
