"""Builds a tree with Canopy inside for SGLang's cache registry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    register_tree_core_backend,
    registered_tree_core_backends,
)
from sglang.srt.runtime_context import get_parallel

from sglang_canopy import releases
from sglang_canopy.admission.gate import SessionGate
from sglang_canopy.config import auto
from sglang_canopy.config.queue import refuse_unsupported
from sglang_canopy.config.refusals import unsupported_reason
from sglang_canopy.config.server_options import options_of
from sglang_canopy.config.setups import DISK, POLICIES
from sglang_canopy.config.tiers import TierOptions
from sglang_canopy.errors import CanopyError
from sglang_canopy.radix import self_test, tier_self_test
from sglang_canopy.radix.cache import CanopyFullComponent, CanopyRadixCache
from sglang_canopy.radix.core import TREE_CORE_BACKEND, CanopyTreeCore
from sglang_canopy.radix.live import make_policies
from sglang_canopy.radix.offset_walk import OffsetWalkCore
from sglang_canopy.radix.overrides import check_overrides
from sglang_canopy.radix.recorder import Recorder
from sglang_canopy.server.scheduler.admission import Admission
from sglang_canopy.server.scheduler.live_order import LiveOrder
from sglang_canopy.server.scheduler.observer import has_floor, meter_of, tier_tokens_of
from sglang_canopy.storage.disk_link import DiskLink
from sglang_canopy.storage.learnt_state import restore_learnt
from sglang_canopy.storage.page_self_test import check_page
from sglang_canopy.storage.settings import BACKEND as OUR_BACKEND
from sglang_canopy.telemetry import reporter
from sglang_canopy.telemetry.auto_line import AutoLine

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext


OVERRIDING_CLASSES = (
    OffsetWalkCore,
    CanopyTreeCore,
    Recorder,
    CanopyRadixCache,
    CanopyFullComponent,
)
"""Classes that override methods of SGLang's classes."""


def install_core() -> None:
    """Register the tree core with SGLang (once per process)."""
    if TREE_CORE_BACKEND not in registered_tree_core_backends():
        register_tree_core_backend(TREE_CORE_BACKEND, CanopyTreeCore)


def prepare_params(
    params: CacheInitParams, tiers: TierOptions | None = None, floor: bool = False
) -> CacheInitParams:
    """Point SGLang's construction parameters at Canopy's core and component, in place. ``floor``: LRU
    ranks while the policy is behind it."""
    params.canopy = make_policies(params.eviction_policy, params.eviction_policy_config, tiers)
    if floor:
        params.canopy.add_floor()
    params.canopy.make_disk_tier = DiskLink
    params.tree_core_backend = TREE_CORE_BACKEND
    params.component_registry_override = {
        **(params.component_registry_override or {}),
        ComponentType.FULL: CanopyFullComponent,
    }
    # NOTE: UnifiedTreeCore.__init__ (unified_tree_core.py) builds one of SGLang's strategies by name,
    # which Canopy's core never uses.
    params.eviction_policy, params.eviction_policy_config = "lru", None
    return params


def new_cache(params: CacheInitParams) -> CanopyRadixCache:
    """Return a cache without a server, for the test of SGLang's tree."""
    install_core()
    return CanopyRadixCache(prepare_params(params))


def build_cache(ctx: TreeCacheBuildContext) -> BasePrefixCache:
    """Return the cache of one scheduler. Raises ``CanopyError`` for an unsupported set-up."""
    refusal = unsupported_reason(POLICIES, ctx.server_args, ctx) or _unsupported_tiers(ctx)
    if refusal:
        raise CanopyError(f"--radix-eviction {ctx.params.eviction_policy}: {refusal}")
    if ctx.server_args.hicache_storage_backend == OUR_BACKEND:
        raise CanopyError(
            "--hicache-storage-backend canopy is read from the command line only, and this server "
            "was started without one; start it with python -m sglang.launch_server, or leave the "
            "disk tier out"
        )
    options = options_of(ctx.server_args)
    refuse_unsupported(options.queue, ctx.server_args, ctx)
    check_overrides(*OVERRIDING_CLASSES)
    check_tree(ctx.params.page_size)
    install_core()
    prepare_params(ctx.params, options.tiers, has_floor(ctx.server_args))
    live = ctx.params.canopy
    if ctx.server_args.hicache_storage_backend == "mooncake":
        from sglang_canopy.storage import mooncake

        mooncake.install_backend(live.tiers.ttl)
    cache = create_unified_radix_cache(ctx, cache_class=CanopyRadixCache)
    check_tiers(cache, ctx.server_args)
    restore_learnt(cache, _world_groups())
    step_tokens = ctx.server_args.chunked_prefill_size or 0
    step_tokens = step_tokens if step_tokens > 0 else ctx.server_args.max_prefill_tokens
    order = LiveOrder(cache, options.queue, step_tokens)
    cache.admission = Admission(order, make_session_gate(ctx.server_args, cache))
    live.meter = meter_of(ctx.server_args, cache, live.ranking_policy_name, live.device_policy)
    auto_line = None
    if options.auto is not None:
        parts = [part.to_json() for part in auto.part_states(ctx.server_args, options, ctx)]
        auto_line = AutoLine(parts, ctx.server_args.tool_call_parser)
    reporter.start_reporter(cache, ctx.params.enable_metrics, auto_line)
    return cache


def check_tree(page_size: int) -> None:
    """Test SGLang's tree. If only the walk by offsets differs, switch it off. Raises ``CanopyError``
    with the step that differs without it, too."""
    OffsetWalkCore.walks_by_offsets = True
    try:
        self_test.check_device_tier(new_cache, page_size)
    except CanopyError as error:
        OffsetWalkCore.walks_by_offsets = False
        self_test.check_device_tier(new_cache, page_size)
        releases.switch_off("walk by offsets", f"{error}; SGLang's own walk is used")


def check_tiers(cache: CanopyRadixCache, server_args: Any) -> None:
    """Test the host tier, and one page of the disk tier. Raises ``CanopyError``."""
    if cache.cache_controller is None or cache.host_memory_mode == "buffer_only":
        return
    device = cache.token_to_kv_pool_allocator.device
    tier_self_test.check_host_tier(new_cache, cache.page_size, server_args, device)
    disk = cache.tree_core.disk
    if isinstance(disk, DiskLink) and disk.store is not None:
        check_page(cache.cache_controller.storage_backend.mem_pool_host)


def _unsupported_tiers(ctx: TreeCacheBuildContext) -> str | None:
    """Return the reason why this model's memory, or the tier below it, cannot be managed here."""
    if getattr(ctx, "is_hybrid_swa", False) and getattr(ctx, "full_tokens_per_layer", None) == 0:
        return (
            "SGLang has a separate cache for models whose layers all have sliding windows; "
            "use --radix-eviction lru"
        )
    if ctx.server_args.hicache_storage_backend is None:
        return None
    return unsupported_reason(DISK, ctx)  # limits of the model, with any storage


def make_session_gate(server_args: Any, cache: CanopyRadixCache) -> SessionGate | None:
    """Return the gate for a scheduler with this cache, if its server has one."""
    settings = options_of(server_args).gate
    return (
        None
        if settings is None
        else SessionGate(settings, tier_tokens_of(server_args, cache).total())
    )


def _world_groups() -> list[Any]:
    """Return the group of all of this scheduler's ranks, for CPU tensors; empty for one rank."""
    world = get_parallel().world_group
    return [] if world is None else [world.cpu_group]
