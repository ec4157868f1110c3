"""What waiting for a place does to the cached prefix of a request.

``by-place`` is the live tree's way: whoever comes is looked up, and the budget goes to the head of
the queue first. ``random-paths`` protects as many paths that nobody waits for: its placebo.

``awaited`` is the live tree with ``--canopy-protect-waiting off`` (``radix/core.py``,
``protect_awaited``): a request that is looked up and not let in protects the deepest node of its path for a minute, within a budget.
Under first come, first served only the head of the queue is looked up; an order that looks at
what is cached, and a prefetch from disk, look at more.

``touched`` is the way of SGLang's own ``lru``: every lookup and every insertion makes a path the
most recent, and before every 32nd step that may let somebody in so are the paths of the first
128 that wait, the head's last (``SchedulePolicy._touch_waiting_prefixes``). It is for comparison
with SGLang's own cache; with another policy than ``lru`` SGLang touches at lookups only.

To add one, write a class with these three methods and name it in ``WAITING_PREFIXES``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from canopy_lab.sim.system.job import SimulatedRequest
from canopy_lab.sim.system.nodes import TierNode, TierNodes
from sglang_canopy.records import Request

REFRESH_EVERY = 32
"""Steps between two refreshes (``WAITING_PREFIX_REFRESH_INTERVAL``)."""
REFRESH_AT_MOST = 128
"""Requests refreshed (``WAITING_QUEUE_PREFIX_MATCH_MAX``)."""


class WaitingPrefixes(Protocol):
    """Hears of lookups, steps and uses in the tree of one instance."""

    def looked_up(self, job: SimulatedRequest, node: TierNode) -> None:
        """``job`` was looked up and goes on waiting; ``node`` is the end of what it found."""

    def before_step(self, waiting: Sequence[SimulatedRequest], matched: bool) -> None:
        """A step that may let somebody in is planned. ``matched``: the order has looked at
        what the waiting jobs have cached."""

    def used(self, leaf: TierNode, request: Request) -> None:
        """``request`` was stamped on the path to ``leaf``, which is locked."""


class Ignored:
    """``ignored``: waiting changes nothing."""

    def __init__(self, tree: TierNodes) -> None:
        self.tree = tree

    def looked_up(self, job: SimulatedRequest, node: TierNode) -> None:
        pass

    def before_step(self, waiting: Sequence[SimulatedRequest], matched: bool) -> None:
        pass

    def used(self, leaf: TierNode, request: Request) -> None:
        pass


class Protected(Ignored):
    """``awaited``: the live tree's, with ``--canopy-protect-waiting off``."""

    def looked_up(self, job: SimulatedRequest, node: TierNode) -> None:
        self.tree.protect(node, job.request.tenant)


class TouchedWhenMatched(Ignored):
    """``matched``: SGLang's for every other policy."""

    def looked_up(self, job: SimulatedRequest, node: TierNode) -> None:
        self.tree.touch(node)

    def used(self, leaf: TierNode, request: Request) -> None:
        self.tree.touch(leaf)


class ProtectedByPlace(Protected):
    """``by-place``: the live tree's.

    Who comes is looked up; every 32nd step the budget is given anew, to the head of the queue
    first.
    """

    def __init__(self, tree: TierNodes) -> None:
        super().__init__(tree)
        self._steps = 0
        self._matched: set[SimulatedRequest] = set()

    def before_step(self, waiting: Sequence[SimulatedRequest], matched: bool) -> None:
        if not waiting:
            self._matched.clear()
            return
        refresh = self._steps % REFRESH_EVERY == 0
        self._steps += 1
        if refresh:
            self._matched = set(waiting)
            self.tree.protect_anew(
                [(self.path_end(job), job.request.tenant) for job in waiting[:REFRESH_AT_MOST]]
            )
            return
        for job in reversed(waiting):  # whoever came since is at the end, or was looked up
            if job not in self._matched:
                self._matched.add(job)
                self.tree.protect(self.path_end(job), job.request.tenant)

    def path_end(self, job: SimulatedRequest) -> TierNode:
        """The deepest node of what is cached of ``job``."""
        tree = self.tree
        return tree.match(job.path, None, job.blocks_of(job.target, tree.block_tokens)).node


class ProtectedAtRandom(ProtectedByPlace):
    """``random-paths``: the same number of paths, drawn from the whole tree: the placebo."""

    def __init__(self, tree: TierNodes) -> None:
        super().__init__(tree)
        self._draw = random.Random(0)

    def path_end(self, job: SimulatedRequest) -> TierNode:
        node = self.tree.root
        while node.children and (node is self.tree.root or self._draw.random() < 0.9):
            node = self._draw.choice(list(node.children.values()))
        return node


class Touched(TouchedWhenMatched):
    """``touched``: SGLang's for its ``lru``."""

    def __init__(self, tree: TierNodes) -> None:
        super().__init__(tree)
        self._steps = 0

    def before_step(self, waiting: Sequence[SimulatedRequest], matched: bool) -> None:
        if matched or not waiting:
            return
        refresh = self._steps % REFRESH_EVERY == 0
        self._steps += 1
        if refresh:
            for job in reversed(waiting[:REFRESH_AT_MOST]):
                self.tree.touch(self.tree.match(job.path_of_prompt(self.tree.block_tokens)).node)


WAITING_PREFIXES: Mapping[str, Callable[[TierNodes], WaitingPrefixes]] = {
    "awaited": Protected,
    "by-place": ProtectedByPlace,
    "random-paths": ProtectedAtRandom,
    "touched": Touched,
    "matched": TouchedWhenMatched,
    "ignored": Ignored,
}
"""By the name that ``SystemConfig.waiting_prefixes`` takes."""
