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
from sglang_canopy.policy.canary import Canary
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
        if isinstance(old, Canary):
            self._retire(old.trial.name, old.trial)
        self._teach(new.device_policy, change.device.name)
        device, host = new.device_policy, new.host_policy
        listeners, after = new.listeners, change.device.name
        if change.canary is None:
            self._retire(live.running, old)
        else:
            device = Canary(_base(old), device, change.canary)
            own_host = live.host_policy
            host = Canary(_base(own_host), host, change.canary, device.sides)
            listeners = (device, host, *listeners[2:])
            after = f"{live.running} and {change.device.name} for {change.canary:g} of the tenants"
        before = _in_words(old, live.running)
        device.sized(live.device_tokens)
        if live.host_tokens:
            host.sized(live.host_tokens)
        live.device_policy, live.host_policy, live.listeners = device, host, listeners
        if change.canary is None:
            live.running = change.device.name
        core.evictable_device_leaves.rank_by(device)
        core.evictable_host_leaves.rank_by(host)
        for node in core._node_arena.values():
            node.canopy.policy = None
        if live.meter is not None:
            live.meter.runs(live.running, _base(device), core.clock.now)
        self.changes.append(Changed(core.clock.now, before, after, why))
        del self.changes[:-MAX_CHANGES]
        logger.info("canopy: policy %s instead of %s (%s)", after, before, why)

    def return_if_due(self) -> None:
        """Go back to LRU where the meter has found it better for long enough."""
        live = self.core.live
        after_s, meter = live.auto_return_s, live.meter
        if after_s is None or meter is None or meter.lru_ahead_since is None:
            return
        if self.core.clock.now - meter.lru_ahead_since >= after_s:
            self.apply(FALLBACK, f"canopy-lru was ahead for {after_s / 60:g} minutes")

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


def _base(policy: Policy) -> Policy:
    return policy.base if isinstance(policy, Canary) else policy


def _in_words(policy: Policy, running: str) -> str:
    return f"{running} with a trial" if isinstance(policy, Canary) else running
