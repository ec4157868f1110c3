"""The parts of one live tree: a policy for each tier, and the tree's own settings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_canopy.config.tiers import TREE_KEYS, TierOptions, TreeSettings, split_config
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.floored import FlooredPolicy
from sglang_canopy.policy.registry import CANOPYS_LRU, make_policy, policy_class
from sglang_canopy.radix.counters import Counters
from sglang_canopy.radix.disk_tier import DiskTier
from sglang_canopy.radix.saved_profile import Profile
from sglang_canopy.whatif.meter import Meter

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LivePolicies:
    """The policies and settings of one live tree."""

    policy_name: str
    """The device policy's name, as in ``--radix-eviction``."""
    settings: TreeSettings
    device_policy: Policy
    host_policy: Policy
    tiers: TierOptions = field(default_factory=TierOptions)
    learners: tuple[Policy, ...] = ()
    """Policies that receive each request. Nodes carry the labels of the first."""
    does_disk_learn: bool = False
    """Whether the disk tier's policy learns from requests."""
    counters: Counters = field(default_factory=Counters)
    profile: Profile | None = None
    """File of the policy's state; ``None`` except on the first rank."""
    meter: Meter | None = None
    """Meter of other policies' hits, with ``--canopy-whatif``."""
    count_free_tokens: Callable[[], int] = int
    """Returns the free tokens of the device now."""
    device_tokens: int = 0
    host_tokens: int = 0
    make_disk_tier: Callable[[Any], DiskTier] = DiskTier
    """Builds the tier below the host from the tree core."""

    def add_floor(self) -> None:
        """Let LRU rank while the policies are behind it (``whatif/floor.py``). A policy for the tail
        accepts fewer hits, and has no floor. Call it before the tree has a leaf."""
        if self.policy_name != CANOPYS_LRU and not policy_class(self.policy_name).takes_tail_target:
            self.device_policy = FlooredPolicy(self.device_policy)
            self.host_policy = FlooredPolicy(self.host_policy)

    @property
    def ranking_policy_name(self) -> str:
        """Return the name of the policy that ranks the device now."""
        device = self.device_policy
        is_lru = isinstance(device, FlooredPolicy) and device.is_lru_ranking
        return CANOPYS_LRU if is_lru else self.policy_name

    def follow_floor(self, meter: Meter) -> None:
        """Rank by the order that ``meter`` finds ahead. Call it at each arrival."""
        device, host = self.device_policy, self.host_policy
        if not (isinstance(device, FlooredPolicy) and isinstance(host, FlooredPolicy)):
            return
        if device.is_lru_ranking == meter.is_behind:
            return
        for policy in (device, host):
            policy.rank_by(lru=meter.is_behind)
        meter.restart(self.ranking_policy_name)
        standing = "behind canopy-lru" if meter.is_behind else "ahead of canopy-lru again"
        ranking = self.ranking_policy_name
        logger.info("canopy: %s ranks: %s is %s", ranking, self.policy_name, standing)

    @property
    def learner(self) -> Policy:
        """The policy whose state is saved; it learns even while another policy ranks."""
        return self.learners[0] if self.learners else self.device_policy


def make_policies(
    policy_name: str, config: Mapping[str, Any] | None, tiers: TierOptions | None = None
) -> LivePolicies:
    """Build the policies of both tiers. Raises ``CanopyError`` for an invalid configuration."""
    tiers = tiers or TierOptions()
    settings, policy_options = split_config(policy_name, config)
    try:
        device_policy = make_policy(policy_name, policy_options)
    except CanopyError as error:
        raise CanopyError(f"{error}; every policy also takes: {', '.join(TREE_KEYS)}") from None
    if getattr(device_policy.config, "caching", None) == "optional":
        raise CanopyError(
            f"policy {policy_name!r}: key 'caching' must be 'forced' on a server, whose KV is in "
            "memory when a request ends; 'optional' is for canopy simulate"
        )
    host_policy = _host_policy(device_policy, policy_options, policy_name, tiers)
    disk = tiers.disk
    disk_policy = device_policy if disk is None else make_policy(disk.name, disk.config)
    # The disk's own policy runs in another thread. If neither tier above learns, an equal policy
    # here makes its labels.
    learners = [policy for policy in (device_policy, host_policy) if policy.learns]
    if not learners and disk_policy.learns:
        learners.append(disk_policy)
    return LivePolicies(
        policy_name,
        settings,
        device_policy,
        host_policy,
        tiers=tiers,
        learners=tuple(learners),
        does_disk_learn=disk_policy.learns,
    )


def _host_policy(
    device_policy: Policy, options: Mapping[str, Any], name: str, tiers: TierOptions
) -> Policy:
    """Return the host tier's policy: the device policy's twin by default."""
    host = tiers.host
    if host is None or (host.name, dict(host.config)) == (name, dict(options)):
        return device_policy.twin()
    return make_policy(host.name, host.config)
