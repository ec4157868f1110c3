"""Exchanging the policies of a tree that is in use. No KV moves, and none is evicted for it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_canopy.config.policy_change import PolicyChange
from sglang_canopy.config.tiers import PolicyChoice
from sglang_canopy.policy.base import Policy
from sglang_canopy.radix.live import live_cache

if TYPE_CHECKING:
    from sglang_canopy.radix.node_metadata import NodeMetadataCore

logger = logging.getLogger(__name__)

FALLBACK = PolicyChange(PolicyChoice("canopy-lru"))
"""What a server goes back to by itself."""
MAX_CHANGES = 16


@dataclass(frozen=True, slots=True)
class Changed:
    """One exchange, for operators."""

    time: float
    """On the requests' clock, in seconds."""
    before: str
    after: str
    why: str


class Exchange:
    """The exchanges of one tree. Call it between two requests, at the same one on every rank."""

    def __init__(self, core: NodeMetadataCore) -> None:
        self.core = core
        self.changes: list[Changed] = []
        """The last ones."""
        self._retired: dict[str, Mapping[str, Any]] = {}
        """What policies had learnt when they went, by name."""

    def apply(self, change: PolicyChange, why: str) -> None:
        """Let the policies of ``change`` rank both tiers from now on.

        One that learns starts from what the meter's arm of its name has learnt, or from what it
        knew itself when it last ran. Raises ``CanopyError`` for a bad configuration.
        """
        core, live = self.core, self.core.live
        tiers = dataclasses.replace(live.tiers, host=change.host)
        if tiers.disk is None:
            tiers = dataclasses.replace(tiers, disk=live.started)  # the disk's is not exchanged
        new = live_cache(change.device.name, change.device.config, tiers, lambda _: None)
        old = live.device_policy
        device, host = new.device_policy, new.host_policy
        before, after = live.running, change.device.name
        self._teach(device, after)
        self._retire(before, old)
        live.device_policy, live.host_policy, live.listeners = device, host, new.listeners
        live.running, live.tiers = after, dataclasses.replace(live.tiers, host=change.host)
        core.evictable_device_leaves.rank_by(device)
        core.evictable_host_leaves.rank_by(host)
        for node in core._node_arena.values():
            node.canopy.policy = None
        if live.meter is not None:
            live.meter.runs(after)
        self.changes.append(Changed(core.clock.now, before, after, why))
        del self.changes[:-MAX_CHANGES]
        logger.info("canopy: policy %s instead of %s (%s)", after, before, why)

    def return_if_due(self) -> None:
        """Go back to LRU where the meter is sure that it hits more."""
        live = self.core.live
        if not live.guarded or live.meter is None or not live.meter.lru_hits_more:
            return
        if not live.device_policy.takes_tail_target:  # those give up hits for the tail
            self.apply(FALLBACK, "the meter is sure that canopy-lru hits more")

    def _retire(self, name: str, policy: Policy) -> None:
        state = policy.state()
        if state:
            self._retired[name] = state

    def _teach(self, policy: Policy, name: str) -> None:
        meter = self.core.live.meter
        state = {} if meter is None else meter.learnt(name)
        state = state or self._retired.get(name, {})
        if state:
            policy.restore(state)
