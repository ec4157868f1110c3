"""``--canopy-copy-ahead``: copies to the host before eviction, as ``radix/copy_ahead.py`` makes them.

The window's size and what goes into it are the live cache's own (``policy/copy_window.py``); here
is what differs: nodes of another tree, and a link whose end of a copy is known when it is asked
for. A copy in flight is not there yet: its node is not evicted before another one that is ready.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from canopy_lab.sim.system.channel import Link
from canopy_lab.sim.system.copy_choices import CopyChoices
from canopy_lab.sim.system.nodes import DEVICE, TierNode
from canopy_lab.sim.system.tree import TieredTree
from sglang_canopy.policy.copy_window import CopyWindow, lowest_ranked
from sglang_canopy.records import Leaf


class CopyAhead:
    """A ``WritePolicy`` that has the next victims copied before their turn.

    ``tokens``: the window's size; ``None`` follows the rate of eviction (``auto``).
    ``at_random``: a placebo that copies as many tokens of random leaves. ``pass_over``: whether a
    victim without a copy lets the next one of the window go first, as the live cache does.
    """

    at_eviction: bool = True

    def __init__(
        self, tokens: int | None = None, at_random: bool = False, pass_over: bool = True
    ) -> None:
        self.tokens = tokens
        self.random = random.Random(0) if at_random else None
        self.pass_over = pass_over and not at_random
        self.copies: CopyChoices | None = self
        self.stalls = 0
        """Victims without a copy, or with one in flight, for which a step waited."""
        self._size: CopyWindow | None = None
        self._window: dict[TierNode, None] = {}
        self._in_flight: set[TierNode] = set()
        self._missed = False
        self._due = 0

    # ---- what the instance asks ----

    def expect(self, tokens: int) -> None:
        """Requests that wait or are half computed will take ``tokens`` in the next steps."""
        self._due = tokens

    def used(self, tree: TieredTree, leaf: TierNode) -> TierNode | None:
        return None

    def ahead(self, tree: TieredTree, link: Link, now: float) -> Iterable[TierNode]:
        if self._size is None:
            self._size = CopyWindow(self.tokens, min(tree.device_tokens, tree.host_tokens))
        self._size.step(tree.free, self._due)
        if not link.idle(now):
            return
        self._in_flight.clear()
        target = self._size.tokens - tree.free
        self._window = {node: None for node in self._window if node.device and node.host}
        covered = sum(node.length for node in self._window)
        if link.reading(now) and not self._size.scarce(tree.free, covered):
            return
        if target <= 0 or not (self._missed or self._size.lacks(tree.free, covered)):
            return
        self._missed = False
        victims = self._next(tree, target)
        self._window = dict.fromkeys(node for node, _ in victims if node.host)
        covered = sum(node.length for node in self._window)
        room = max(self._size.batch, tree.block_tokens)
        for node, keep in victims:
            need = min(target - covered, room)
            if need <= 0:
                return
            if node.host:
                continue
            tree.cut_tail(node, keep, need)
            self._window[node] = None
            self._in_flight.add(node)
            room -= node.length
            covered += node.length
            yield node

    def _next(self, tree: TieredTree, target: int) -> list[tuple[TierNode, int]]:
        if self.random is None:
            found = lowest_ranked(tree.device_policy, target, tree.now, _exposed)
            return [(victim.leaf, victim.keep) for victim in found]  # type: ignore[misc]
        leaves = list(tree.device_policy.leaves())
        self.random.shuffle(leaves)
        chosen = []
        for leaf in leaves:
            if target <= 0:
                break
            chosen.append((leaf, 0))
            target -= leaf.length
        return chosen  # type: ignore[return-value]

    # ---- what the tree asks ----

    def choose(self, node: TierNode, keep: int) -> tuple[TierNode, int, bool]:
        """The victim to take instead of ``node``, what to keep, and whether its copy is waited for."""
        if self._ready(node):
            return node, keep, False
        self._missed = True
        if self.pass_over:
            for other in self._window:
                if other.ranked == DEVICE and self._ready(other):
                    return other, 0, False
        self.stalls += 1
        if self._size is not None:
            self._size.waited()
        return node, keep, node in self._in_flight

    def _ready(self, node: TierNode) -> bool:
        return node.host and node not in self._in_flight

    def evicted(self, tokens: int) -> None:
        """So many tokens left the device."""
        if self._size is not None:
            self._size.evicted(tokens)

    def split(self, node: TierNode, head: TierNode) -> None:
        """``head`` holds the first blocks of ``node`` now."""
        if node in self._window:
            self._window[head] = None
        if node in self._in_flight:
            self._in_flight.add(head)

    def used_again(self, node: TierNode) -> None:
        """A request used ``node``: it is no longer among the next to go."""
        self._window.pop(node, None)

    def spares(self, node: TierNode) -> bool:
        """Whether the host gives up other copies of what the device has before this one."""
        return node in self._window


def _exposed(leaf: Leaf, gone: set[Leaf]) -> Leaf | None:
    """The parent of ``leaf``, if nothing but ``gone`` keeps it from being evictable."""
    node: TierNode = leaf.parent  # type: ignore[attr-defined]
    if node.parent is None or node.locks or node.ranked:
        return None
    if any(child.device and child not in gone for child in node.children.values()):
        return None
    if node.ranker != DEVICE:
        node.ranker, node.slot = DEVICE, None
    return node
