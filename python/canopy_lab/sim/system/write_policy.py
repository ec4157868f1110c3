"""Time of the copies from device to host: SGLang's ``--hicache-write-policy``.

To add a policy, implement ``WritePolicy`` and list the class in ``WRITE_POLICIES``; ``SystemConfig``
takes its name as ``write_policy``.

Blocking in SGLang 0.5.23 (``unified_radix_cache.py``): a copy after insertion (``write_through``,
``write_through_selective``) runs on its own stream and blocks no step. A copy at eviction
(``write_back``) waits for the running forward, and ``writing_check(write_back=True)`` waits for the
copy, one victim after the other, before the next step is launched. So a step that evicts starts after
the copies of its victims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from canopy_lab.sim.system.nodes import TierNode
from canopy_lab.sim.system.tree import TieredTree


class WritePolicy(Protocol):
    """Chooses the copies from device to host; one object per instance."""

    at_eviction: bool
    """Whether victims without a host copy are copied first; the step waits for the copy."""

    def used(self, tree: TieredTree, leaf: TierNode) -> TierNode | None:
        """Return the node to copy, with its ancestors, after a use of ``leaf``, or ``None``.

        ``leaf.hits`` counts requests. The copy overlaps the next step.
        """


class WriteThrough:
    """``write_through``: copy every node after insertion."""

    at_eviction: bool = False
    threshold: int = 1

    def used(self, tree: TieredTree, leaf: TierNode) -> TierNode | None:
        while leaf is not tree.root and leaf.hits < self.threshold:
            leaf = leaf.parent
        return None if leaf is tree.root else leaf


class WriteThroughSelective(WriteThrough):
    """``write_through_selective``: copy nodes after two uses (``write_through_threshold``)."""

    threshold: int = 2


class WriteBack:
    """``write_back``: copy nodes at their eviction from the device."""

    at_eviction: bool = True

    def used(self, tree: TieredTree, leaf: TierNode) -> TierNode | None:
        return None


WRITE_POLICIES: Mapping[str, Callable[..., WritePolicy]] = {
    "write_through": WriteThrough,
    "write_through_selective": WriteThroughSelective,
    "write_back": WriteBack,
}
"""Write policies by their SGLang name."""


def make_write_policy(name: str) -> WritePolicy:
    return WRITE_POLICIES[name]()
