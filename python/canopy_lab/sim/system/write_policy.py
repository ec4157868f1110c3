"""When KV on the device is copied to the host: SGLang's ``--hicache-write-policy``.

To add one, write a class with ``at_eviction`` and ``used`` and name it in ``WRITE_POLICIES``;
``SystemConfig`` takes the name as ``write_policy``.

What blocks in SGLang 0.5.23 (``unified_radix_cache.py``): a copy after insertion
(``write_through``, ``write_through_selective``) runs on a stream of its own and nobody waits. A
copy at eviction (``write_back``) is waited for: the copy stream waits for the forward under way,
and ``writing_check(write_back=True)`` for the copy, one victim after the other, before the next
step is launched. So the step that evicts begins when the copies of its victims are done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from canopy_lab.sim.system.nodes import TierNode
from canopy_lab.sim.system.tree import TieredTree


class WritePolicy(Protocol):
    """Chooses the copies from device to host of one instance. One object an instance."""

    at_eviction: bool
    """A victim without a copy on the host is copied before it goes, and the step waits for it;
    else it is gone."""

    def used(self, tree: TieredTree, leaf: TierNode) -> TierNode | None:
        """A request has used the path to ``leaf`` (``leaf.hits`` counts requests): the node to
        be copied now, with all above it that is not on the host, beside the next step."""


class WriteThrough:
    """``write_through``: everything, after it was inserted."""

    at_eviction: bool = False
    threshold: int = 1

    def used(self, tree: TieredTree, leaf: TierNode) -> TierNode | None:
        while leaf is not tree.root and leaf.hits < self.threshold:
            leaf = leaf.parent
        return None if leaf is tree.root else leaf


class WriteThroughSelective(WriteThrough):
    """``write_through_selective``: what two requests have used (``write_through_threshold``)."""

    threshold: int = 2


class WriteBack:
    """``write_back``: what leaves the device, when it leaves."""

    at_eviction: bool = True

    def used(self, tree: TieredTree, leaf: TierNode) -> TierNode | None:
        return None


WRITE_POLICIES: Mapping[str, Callable[..., WritePolicy]] = {
    "write_through": WriteThrough,
    "write_through_selective": WriteThroughSelective,
    "write_back": WriteBack,
}
"""By SGLang's names."""


def make_write_policy(name: str) -> WritePolicy:
    """The policy of that name; raises ``KeyError``."""
    return WRITE_POLICIES[name]()
