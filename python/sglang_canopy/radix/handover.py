"""A tier's leaves pass to another policy in slices, while the present policy goes on to rank them.

Ranking 50,000 leaves anew takes hundreds of milliseconds, for which no request could be scheduled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from sglang_canopy.policy.base import Policy

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_canopy.radix.leaf import NodeLeaf


class Handover:
    """Fills ``policy``, which ranks nothing yet.

    ``nodes``: those that the present policy may rank, each once. Leaves that the present policy
    admits or drops meanwhile are reported here too. The new policy's view of a leaf is
    ``next_slot``; it is in ``slot`` only during a call of the new policy.
    """

    def __init__(self, policy: Policy, nodes: Iterable[UnifiedTreeNode], now: float) -> None:
        self.policy = policy
        self._nodes = iter(list(nodes))
        # Without leaves, a policy takes note of its present fit; later it would rank all anew.
        policy.victim(now)

    def slice(self, count: int) -> list[UnifiedTreeNode]:
        """Return the next ``count`` nodes to pass on; fewer at the end."""
        return list(islice(self._nodes, count))

    def admit(self, leaf: NodeLeaf, now: float) -> None:
        """Rank ``leaf`` by the new policy, unless it does so already."""
        if leaf.next_policy is self.policy:
            return
        leaf.next_policy, leaf.next_slot = self.policy, None
        self._call(self.policy.admit, leaf, now)

    def drop(self, leaf: NodeLeaf) -> None:
        if leaf.next_policy is self.policy:
            self._call(self.policy.drop, leaf)
            leaf.next_policy = leaf.next_slot = None

    def split(self, leaf: NodeLeaf, head: NodeLeaf) -> None:
        """``head`` now holds the first tokens of ``leaf``."""
        if leaf.next_policy is self.policy:
            self._call(self.policy.split, leaf, head)

    def finish(self) -> Policy:
        """Make the new policy's view of each leaf the leaf's ``slot``; returns the policy."""
        policy = self.policy
        leaf: NodeLeaf
        for leaf in policy.leaves():  # type: ignore[assignment]
            leaf.policy, leaf.slot = policy, leaf.next_slot
            leaf.next_policy = leaf.next_slot = None
        return policy

    @staticmethod
    def _call(call: Callable[..., None], leaf: NodeLeaf, *arguments: Any) -> None:
        leaf.slot, leaf.next_slot = leaf.next_slot, leaf.slot
        try:
            call(leaf, *arguments)
        finally:
            leaf.slot, leaf.next_slot = leaf.next_slot, leaf.slot
