"""Exchanging the policies of a tree that is in use. No KV moves, and none is evicted for it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_canopy.config.policy_change import PolicyChange
from sglang_canopy.config.tiers import PolicyChoice
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.registry import options_of
from sglang_canopy.radix.live import LiveCache, live_cache
from sglang_canopy.radix.tree import Tree
from sglang_canopy.reuse import saved_curves
from sglang_canopy.whatif.meter import Meter

logger = logging.getLogger(__name__)

FALLBACK = PolicyChange(PolicyChoice("canopy-lru"))
"""What a server goes back to by itself while its policy is behind the floor."""
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

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.changes: list[Changed] = []
        """The last ones."""
        self._retired: dict[str, Mapping[str, Any]] = {}
        """What policies had learnt when they went, by name."""
        self._wanted: PolicyChange | None = None
        """What was asked for, while LRU ranks in its place."""

    def apply(self, change: PolicyChange, why: str) -> None:
        """Let the policies of ``change`` rank both tiers from now on.

        While the new one does not learn, the one before goes on to learn and to label, so that
        whoever comes back finds its labels on what was cached meanwhile. Any other that learns
        starts from what the meter's arm of its name has learnt, or from what it knew itself when it
        last ran. Raises ``CanopyError`` for a bad configuration.
        """
        self._exchange(change, why)
        self._wanted = None

    def keep_the_floor(self, meter: Meter) -> None:
        """LRU instead of a policy that has fallen too far behind it, and that policy again once it
        would have been ahead."""
        live = self.tree.live
        if not live.keeps_floor or live.device_policy.takes_tail_target:
            return  # a policy for the tail gives up hits
        if meter.keeper == live.running:
            return
        wanted = self._wanted
        if wanted is None:
            choice = PolicyChoice(live.running, options_of(live.device_policy))
            self._wanted = PolicyChange(choice, live.tiers.host)
            self._exchange(FALLBACK, f"{live.running} is behind canopy-lru", keep_floor=True)
        else:
            self._wanted = None
            why = f"{wanted.device.name} is ahead of canopy-lru again"
            self._exchange(wanted, why, keep_floor=True)

    def _exchange(self, change: PolicyChange, why: str, keep_floor: bool = False) -> None:
        tree, live = self.tree, self.tree.live
        tiers = dataclasses.replace(live.tiers, host=change.host)
        if tiers.disk is None:
            tiers = dataclasses.replace(tiers, disk=live.started)  # the disk's is not exchanged
        new = live_cache(change.device.name, change.device.config, tiers, lambda _: None)
        old = live.device_policy
        before, after = live.running, change.device.name
        device, host, learners = self._taught(new, after)
        self._retire(before, old)
        live.device_policy, live.host_policy, live.learners = device, host, learners
        live.running, live.tiers = after, dataclasses.replace(live.tiers, host=change.host)
        tree.evictable_device_leaves.rank_by(device)
        tree.evictable_host_leaves.rank_by(host)
        for node in tree._node_arena.values():
            node.canopy.policy = None
        if live.meter is not None:
            live.meter.runs(after, device, keep_floor)
        self.changes.append(Changed(tree.clock.now, before, after, why))
        del self.changes[:-MAX_CHANGES]
        logger.info("canopy: policy %s instead of %s (%s)", after, before, why)

    def _taught(self, new: LiveCache, name: str) -> tuple[Policy, Policy, tuple[Policy, ...]]:
        """Who ranks the device and the host, and who learns."""
        device, host, learners = new.device_policy, new.host_policy, new.learners
        before = self.tree.live.learners
        if not (device.learns or host.learns):
            same = tuple(_going_on(one, before) or one for one in learners)  # the disk's
            return device, host, same or tuple(map(_learning, before))
        kept = _going_on(device, before) if device.learns else None
        if kept is None:
            self._teach(device, name)
            return device, host, learners
        twins = type(host) is type(device) and not host.learns
        others = tuple(policy for policy in learners if policy is not device)
        return kept, kept.twin() if twins else host, (kept, *others)

    def _retire(self, name: str, policy: Policy) -> None:
        state = policy.state()
        if state:
            self._retired[name] = state

    def _teach(self, policy: Policy, name: str) -> None:
        meter = self.tree.live.meter
        state = {} if meter is None else meter.learnt(name)
        state = state or self._retired.get(name, {})
        if state:
            # It may have been learnt with other options.
            with contextlib.suppress(saved_curves.OtherLabels):
                policy.restore(state)


def _going_on(policy: Policy, learners: tuple[Policy, ...]) -> Policy | None:
    """One that goes on with what ``policy``'s equal among ``learners`` learns."""
    for one in learners:
        if type(one) is type(policy) and one.config == policy.config:
            return _learning(one)
    return None


def _learning(policy: Policy) -> Policy:
    """One without leaves that goes on with what ``policy`` learns."""
    fresh = policy.twin()
    fresh.learns = True
    return fresh
