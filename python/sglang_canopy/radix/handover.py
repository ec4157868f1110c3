"""Handover of a tier's leaves to another policy in slices, while the current policy still ranks
them.

Ranking 50,000 leaves again takes hundreds of milliseconds, in which no request could be scheduled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from sglang_canopy.policy.base import Policy
from sglang_canopy.radix.live_request import NodeLeaf

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

_SLOT = vars(NodeLeaf.__mro__[1])["slot"]


class PassedLeaf(NodeLeaf):
    """A ``NodeLeaf`` with views of two policies; a leaf has this class only during a handover.

    ``slot`` is the current policy's view until the handover is complete, then the new policy's. A
    complete handover settles each leaf in a slice or at the first use of ``slot``.
    """

    __slots__ = ()

    @property
    def slot(self) -> Any:  # type: ignore[override]
        if self._is_settled():
            return self.slot
        return _SLOT.__get__(self)

    @slot.setter
    def slot(self, value: Any) -> None:
        if self._is_settled():
            self.slot = value
        else:
            _SLOT.__set__(self, value)

    def _is_settled(self) -> bool:
        assert self.handover is not None
        if self.handover.complete:
            self.handover.settle(self)
        return type(self) is NodeLeaf


class Handover:
    """Fills ``policy``, which has no leaves yet.

    ``nodes``: the nodes that the current policy may rank, each once. Leaves that the current policy
    admits or drops in the meantime are reported here too. The new policy's view of a leaf is
    ``next_slot``; it is in ``slot`` only during a call of the new policy.
    """

    def __init__(self, policy: Policy, nodes: Iterable[UnifiedTreeNode], now: float) -> None:
        self.policy = policy
        self.complete = False
        """Whether all leaves have been passed, so that the new policy ranks."""
        self._nodes = iter(nodes)
        self._passed: list[NodeLeaf] = []
        # Without leaves, a policy adopts its latest fit at once; later it would rank all leaves
        # again.
        policy.victim(now)

    def slice(self, count: int) -> list[UnifiedTreeNode]:
        """Return the next ``count`` nodes to pass on; fewer at the end."""
        return list(islice(self._nodes, count))

    def admit(self, leaf: NodeLeaf, now: float) -> None:
        """Rank ``leaf`` by the new policy, unless it already does."""
        if self.complete or leaf.handover is self:
            return
        if leaf.handover is not None:
            leaf.handover.settle(leaf)
        leaf.handover, leaf.next_slot = self, None
        leaf.__class__ = PassedLeaf
        self._passed.append(leaf)
        self._call(self.policy.admit, leaf, now)

    def drop(self, leaf: NodeLeaf) -> None:
        """Handle a drop of ``leaf`` by the current policy."""
        if leaf.handover is None:
            return
        if leaf.handover is self and not self.complete:
            self._call(self.policy.drop, leaf)
        leaf.handover.settle(leaf)

    def split(self, leaf: NodeLeaf, head: NodeLeaf) -> None:
        """Handle a split: ``head`` now holds the first tokens of ``leaf``."""
        if leaf.handover is self and not self.complete:
            self._call(self.policy.split, leaf, head)

    def settle(self, leaf: NodeLeaf) -> None:
        """Turn a passed leaf back into an ordinary leaf, with the new policy's view after a
        complete handover."""
        view, leaf.next_slot, leaf.handover = leaf.next_slot, None, None
        leaf.__class__ = NodeLeaf
        if self.complete:
            leaf.policy, leaf.slot = self.policy, view

    def settle_slice(self, count: int) -> bool:
        """Settle the next ``count`` leaves. Returns whether all are settled."""
        for leaf in self._passed[-count:]:
            if leaf.handover is self:
                self.settle(leaf)
        del self._passed[-count:]
        return not self._passed

    @staticmethod
    def _call(call: Callable[..., None], leaf: NodeLeaf, *arguments: Any) -> None:
        leaf.slot, leaf.next_slot = leaf.next_slot, leaf.slot
        try:
            call(leaf, *arguments)
        finally:
            leaf.slot, leaf.next_slot = leaf.next_slot, leaf.slot
