"""Exchange the policies of a tree in use. No KV is moved or evicted."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_canopy.config.policy_change import PolicyChange
from sglang_canopy.config.tiers import PolicyChoice
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.registry import live_name, options_of, policy_class
from sglang_canopy.radix.live import LiveCache, live_cache
from sglang_canopy.radix.tree import Tree
from sglang_canopy.reuse import saved_curves
from sglang_canopy.whatif.meter import Meter

logger = logging.getLogger(__name__)

FALLBACK = PolicyChange(PolicyChoice("canopy-lru"))
"""Policy of a server whose own policy is below the floor."""
MAX_CHANGES = 16
SLICE_NODES = 512
"""Nodes passed to the new policies per arrival, in each tier: about two milliseconds.

A count instead of a time, so that every rank changes its order at the same request.
"""


@dataclass(frozen=True, slots=True)
class Changed:
    """One exchange, for operators."""

    time_unix_s: float
    """Wall time on this rank, only for operators: no decision depends on it."""
    before: str
    after: str
    why: str


class Exchange:
    """The exchanges of one tree. Call its methods between two requests, at the same point on every
    rank.

    New policies learn from the start of the exchange. They rank once they have received every leaf,
    a slice per arrival; until then the previous policies rank (``LiveCache.device_policy``). The
    memory of the previous policies is then released, a slice per arrival.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.changes: list[Changed] = []
        """The latest exchanges."""
        self.handing_over = False
        """Whether ``advance`` has work left."""
        self._retired: dict[str, Mapping[str, Any]] = {}
        """State of policies that no longer learn, by name."""
        self._wanted: PolicyChange | None = None
        """The requested change, while LRU ranks instead."""

    def apply(self, change: PolicyChange, why: str) -> None:
        """Start to replace the policies of both tiers by those of ``change``.

        If none of the new policies learns, the previous learning policies continue to learn and to
        label, so that nodes have their labels if they return. A new policy that learns continues
        with the model of an equal policy. Otherwise it starts from the meter's arm of its name, or
        from the state of its last run. Raises ``CanopyError`` for an invalid configuration.
        """
        self._exchange(change, why)
        self._wanted = None

    def advance(self) -> None:
        """Pass one slice of leaves to the new policies, or release a slice of the old ones. Call it
        at every arrival while ``handing_over``."""
        device, host = self.tree.evictable_device_leaves, self.tree.evictable_host_leaves
        if device.hand_over(SLICE_NODES):
            self.tree.live.device_policy = device.policy
        if host.hand_over(SLICE_NODES):
            self.tree.live.host_policy = host.policy
        self.handing_over = device.handing_over or host.handing_over

    def finish(self) -> None:
        """Let the new policies rank at once, as the tree is empty."""
        live = self.tree.live
        live.device_policy = self.tree.evictable_device_leaves.next_policy
        live.host_policy = self.tree.evictable_host_leaves.next_policy
        self.handing_over = False

    def keep_the_floor(self, meter: Meter) -> None:
        """Replace a policy that is too far behind LRU, and restore it once it would be ahead."""
        live = self.tree.live
        if not live.keeps_floor or meter.keeper == live.running:
            return
        if policy_class(live.running).takes_tail_target:
            return  # a policy for the tail accepts fewer hits
        wanted = self._wanted
        if wanted is None:
            options = options_of(self.tree.evictable_device_leaves.next_policy)
            self._wanted = PolicyChange(PolicyChoice(live.running, options), live.tiers.host)
            self._exchange(FALLBACK, f"{live.running} is behind canopy-lru", keep_floor=True)
        else:
            self._wanted = None
            why = f"{wanted.device.name} is ahead of canopy-lru again"
            self._exchange(wanted, why, keep_floor=True)

    def _exchange(self, change: PolicyChange, why: str, keep_floor: bool = False) -> None:
        tree, live = self.tree, self.tree.live
        tiers = dataclasses.replace(live.tiers, host=change.host)
        if tiers.disk is None:
            tiers = dataclasses.replace(
                tiers, disk=live.started
            )  # the disk's policy is not exchanged
        new = live_cache(change.device.name, change.device.config, tiers, lambda _: None)
        before, after = live.running, change.device.name
        device, host, live.learners = self._with_learnt_state(new)
        live.running, live.tiers = after, dataclasses.replace(live.tiers, host=change.host)
        nodes = list(tree._node_arena.values())
        tree.evictable_device_leaves.begin_handover(device, nodes)
        tree.evictable_host_leaves.begin_handover(host, nodes)
        self.advance()
        if live.meter is not None:
            live.meter.runs(after, device, keep_floor)
        self.changes.append(Changed(time.time(), before, after, why))
        del self.changes[:-MAX_CHANGES]
        logger.info("canopy: policy %s instead of %s (%s)", after, before, why)

    def _with_learnt_state(self, new: LiveCache) -> tuple[Policy, Policy, tuple[Policy, ...]]:
        """Return the policies of device and host, and the learning policies, device first."""
        before = self.tree.live.learners
        for policy in reversed(before):  # the device's state is saved last, so that it remains
            if state := policy.state():
                self._retired[policy.name] = state
        device, host = new.device_policy, new.host_policy
        if not (device.learns or host.learns):
            same = tuple(self._learner(one, before) for one in new.learners)  # the disk's policy
            return device, host, same or tuple(map(_learning, before))
        twins = type(host) is type(device) and not host.learns
        if device.learns:
            device = self._learner(device, before)
        if host.learns:
            host = self._learner(host, before)
        elif twins:
            host = device.twin()
        return device, host, tuple(policy for policy in (device, host) if policy.learns)

    def _learner(self, policy: Policy, before: tuple[Policy, ...]) -> Policy:
        """Return ``policy`` with the state of an equal learner, the meter, or its own last run."""
        same = _sharing_model(policy, before)
        if same is not None:
            return same
        meter = self.tree.live.meter
        state = {} if meter is None else meter.learnt(live_name(policy.name))
        state = state or self._retired.get(policy.name, {})
        if state:
            # The state may have been learnt with other options.
            with contextlib.suppress(saved_curves.OtherLabels):
                policy.restore(state)
        return policy


def _sharing_model(policy: Policy, learners: tuple[Policy, ...]) -> Policy | None:
    """Return a policy that shares the model of ``policy``'s equal in ``learners``, or ``None``."""
    for one in learners:
        if type(one) is type(policy) and one.config == policy.config:
            return _learning(one)
    return None


def _learning(policy: Policy) -> Policy:
    """Return a policy without leaves that continues ``policy``'s learning."""
    fresh = policy.twin()
    fresh.learns = True
    return fresh
