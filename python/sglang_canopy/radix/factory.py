"""How SGLang's cache registry gets a tree with Canopy in it."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    register_tree_core_backend,
    registered_tree_core_backends,
)
from sglang.srt.runtime_context import get_parallel

from sglang_canopy.config import TREE_KEYS, TierOptions, TreeSettings, split_config
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.radix import reporter
from sglang_canopy.radix.cache import CanopyRadixCache
from sglang_canopy.radix.component import CanopyFullComponent
from sglang_canopy.radix.core import BACKEND, CanopyTreeCore
from sglang_canopy.radix.counters import Counters
from sglang_canopy.radix.options import BACKEND as OUR_BACKEND
from sglang_canopy.radix.options import NOTE
from sglang_canopy.radix.profile import Profile, from_first_rank
from sglang_canopy.reuse import profile

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext


@dataclass(slots=True)
class LiveCache:
    """What one live tree needs to know: its policies and the tree's own settings."""

    settings: TreeSettings
    device_policy: Policy
    host_policy: Policy
    tiers: TierOptions = field(default_factory=TierOptions)
    listeners: tuple[Policy, ...] = ()
    """Whom each request is announced to. Nodes carry the labels of the first."""
    disk_learns: bool = False
    """Whether the disk tier's policy wants to hear of requests."""
    counters: Counters = field(default_factory=Counters)
    profile_path: str | None = None
    """The device policy's profile, if it has one."""
    profile: Profile | None = None
    """Where what the policy learns is saved; ``None`` on every rank but the first."""


ReadProfile = Callable[[str], Any]
"""From a profile's path to its JSON; ``None`` where no run has saved it yet."""


def live_cache(
    policy: str,
    config: Mapping[str, Any] | None,
    tiers: TierOptions | None = None,
    read_profile: ReadProfile = profile.read,
) -> LiveCache:
    """Build the policies of both tiers. Raises ``CanopyError`` for a bad configuration."""
    tiers = tiers or TierOptions()
    settings, options = split_config(policy, config)
    try:
        device = _policy(policy, options, read_profile)
    except CanopyError as error:
        raise CanopyError(f"{error}; every policy also takes: {', '.join(TREE_KEYS)}") from None
    if getattr(device.config, "caching", None) == "optional":
        raise CanopyError(
            f"policy {policy!r}: key 'caching' must be 'forced' on a server, whose KV is in "
            "memory when a request ends; 'optional' is for canopy simulate"
        )
    host = _host_policy(device, options, policy, tiers, read_profile)
    disk = (
        device if tiers.disk is None else _policy(tiers.disk.name, tiers.disk.config, read_profile)
    )
    # Labels are the first's that refines categories. The disk's own is in another thread: an
    # equal one here makes its labels where neither of the two above does.
    listeners = [device, host] if _learns(device) or not _learns(host) else [host, device]
    if _learns(disk) and not _learns(listeners[0]):
        listeners.insert(0, disk)
    return LiveCache(
        settings,
        device,
        host,
        tiers=tiers,
        listeners=tuple(listeners),
        disk_learns=_learns(disk),
        profile_path=options.get("profile"),
    )


def _policy(name: str, options: Mapping[str, Any], read_profile: ReadProfile) -> Policy:
    """A policy that starts from what ``read_profile`` reads, if it has a profile."""
    path = options.get("profile")
    if not isinstance(path, str):
        return make_policy(name, options)
    policy = make_policy(name, {**options, "profile": None})
    saved = read_profile(path)
    if saved is not None:
        policy.restore(saved)
    return policy


def _learns(policy: Policy) -> bool:
    return type(policy).arrive is not Policy.arrive


def _host_policy(
    device: Policy,
    options: Mapping[str, Any],
    name: str,
    tiers: TierOptions,
    read_profile: ReadProfile,
) -> Policy:
    """The host tier's: the device policy's twin, unless another one was asked for."""
    host = tiers.host
    if host is None or (host.name, dict(host.config)) == (name, dict(options)):
        return device.twin()
    return _policy(host.name, host.config, read_profile)


def install_core() -> None:
    """Register the tree core with SGLang (once a process)."""
    if BACKEND not in registered_tree_core_backends():
        register_tree_core_backend(BACKEND, CanopyTreeCore)


def prepare(
    params: CacheInitParams,
    tiers: TierOptions | None = None,
    read_profile: ReadProfile = profile.read,
) -> CacheInitParams:
    """Point SGLang's construction parameters at Canopy's core and component, in place."""
    params.canopy = live_cache(
        params.eviction_policy, params.eviction_policy_config, tiers, read_profile
    )
    params.tree_core_backend = BACKEND
    params.component_registry_override = {
        **(params.component_registry_override or {}),
        ComponentType.FULL: CanopyFullComponent,
    }
    # NOTE: SGLang's core builds one of its own strategies by name; ours never asks it.
    params.eviction_policy, params.eviction_policy_config = "lru", None
    return params


def build(ctx: TreeCacheBuildContext) -> BasePrefixCache:
    """The cache for one scheduler, or ``CanopyError`` for a model that is not supported."""
    if ctx.is_hybrid_swa:
        raise CanopyError(_unsupported(ctx, "sliding-window attention"))
    if ctx.is_hybrid_ssm:
        raise CanopyError(_unsupported(ctx, "Mamba or linear-attention state"))
    if ctx.server_args.hicache_storage_backend == OUR_BACKEND:
        raise CanopyError(
            "--hicache-storage-backend canopy is read from the command line only, and this server "
            "was started without one; start it with python -m sglang.launch_server, or leave the "
            "disk tier out"
        )
    install_core()
    prepare(ctx.params, getattr(ctx.server_args, NOTE, None), first_ranks_profile)
    live = ctx.params.canopy
    if live.profile_path is not None and _is_first_rank():
        live.profile = Profile(live.profile_path)
        _claim(live.profile)
        atexit.register(live.profile.save, live.device_policy)
    if ctx.server_args.hicache_storage_backend == "mooncake":
        from sglang_canopy.radix import mooncake

        mooncake.install(live.tiers.ttl)
    cache = create_unified_radix_cache(ctx, cache_class=CanopyRadixCache)
    reporter.start(cache, ctx.params.enable_metrics)
    return cache


def first_ranks_profile(path: str) -> Any:
    """A profile as the first of this scheduler's ranks reads it. Collective, see there."""
    world = get_parallel().world_group
    return from_first_rank(path, None if world is None else world.cpu_group)


def _is_first_rank() -> bool:
    """Whether this is the first rank of the server, its data-parallel replicas included."""
    parallel = get_parallel()
    return not (parallel.tp_rank or parallel.pp_rank or parallel.dp_rank)


def _claim(mine: Profile) -> None:
    """Say at the start, not at the first save, if another server saves to this profile."""
    with contextlib.suppress(OSError):  # said when it is saved
        mine.claim()


def _unsupported(ctx: TreeCacheBuildContext, what: str) -> str:
    return (
        f"--radix-eviction {ctx.params.eviction_policy} does not support models with {what}; "
        "use one of SGLang's own policies (--radix-eviction lru) for this model"
    )
