"""When KV on the device is copied to the host: SGLang's ``--hicache-write-policy``.

To add one, write a class with ``at_eviction``, ``used`` and ``ahead`` and name it in
``WRITE_POLICIES``; ``SystemConfig`` takes the name as ``write_policy`` and the class's arguments
as ``write_policy_config``.

What blocks in SGLang 0.5.23 (``unified_radix_cache.py``): a copy after insertion
(``write_through``, ``write_through_selective``) runs on a stream of its own and nobody waits. A
copy at eviction (``write_back``) is waited for: the copy stream waits for the forward under way,
and ``writing_check(write_back=True)`` for the copy, one victim after the other, before the next
step is launched. So the step that evicts begins when the copies of its victims are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from canopy_lab.sim.system.channel import Link
from canopy_lab.sim.system.copy_ahead import CopyAhead
from canopy_lab.sim.system.copy_choices import CopyChoices
from canopy_lab.sim.system.nodes import TierNode
from canopy_lab.sim.system.tree import TieredTree


class WritePolicy(Protocol):
    """Chooses the copies from device to host of one instance. One object an instance."""

    at_eviction: bool
    """A victim without a copy on the host is copied before it goes, and the step waits for it;
    else it is gone."""

    copies: CopyChoices | None
    """What chooses among victims those whose copies are there; ``None``: the device's policy."""

    def used(self, tree: TieredTree, leaf: TierNode) -> TierNode | None:
        """A request has used the path to ``leaf`` (``leaf.hits`` counts requests): the node to
        be copied now, with all above it that is not on the host, beside the next step."""

    def ahead(self, tree: TieredTree, link: Link, now: float) -> Iterable[TierNode]:
        """Nodes to be copied in the background, each with what is above it unless ``at_eviction``;
        asked at the end of every step. ``link.idle(now)`` tells whether copies made before are done."""


class WriteThrough:
    """``write_through``: everything, after it was inserted."""

    at_eviction: bool = False
    copies: CopyChoices | None = None
    threshold: int = 1

    def used(self, tree: TieredTree, leaf: TierNode) -> TierNode | None:
        while leaf is not tree.root and leaf.hits < self.threshold:
            leaf = leaf.parent
        return None if leaf is tree.root else leaf

    def ahead(self, tree: TieredTree, link: Link, now: float) -> Iterable[TierNode]:
        return ()


class WriteThroughSelective(WriteThrough):
    """``write_through_selective``: what two requests have used (``write_through_threshold``)."""

    threshold: int = 2


class WriteBack:
    """``write_back``: what leaves the device, when it leaves."""

    at_eviction: bool = True
    copies: CopyChoices | None = None

    def used(self, tree: TieredTree, leaf: TierNode) -> TierNode | None:
        return None

    def ahead(self, tree: TieredTree, link: Link, now: float) -> Iterable[TierNode]:
        return ()


WRITE_POLICIES: Mapping[str, Callable[..., WritePolicy]] = {
    "write_through": WriteThrough,
    "write_through_selective": WriteThroughSelective,
    "write_back": WriteBack,
    "copy_ahead": CopyAhead,
}
"""By SGLang's names; ``copy_ahead`` is ``write_back`` with ``--canopy-copy-ahead``."""


def make_write_policy(name: str, config: Mapping[str, Any]) -> WritePolicy:
    """The policy of that name, with its arguments; raises ``KeyError`` or ``TypeError``."""
    return WRITE_POLICIES[name](**config)
