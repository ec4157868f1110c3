"""Placebos of the session gate, the queue order and the protection of waiting prefixes.

Importing this module adds them to the simulator's choices, for the arms of this folder.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Sequence

from canopy_lab.sim.system.gate import SESSION_GATES, Turn
from canopy_lab.sim.system.job import SimulatedRequest
from canopy_lab.sim.system.nodes import TierNode, TierNodes
from canopy_lab.sim.system.queue_order import QUEUE_ORDERS, QueueView
from canopy_lab.sim.system.waiting import WAITING_PREFIXES, ProtectedByPlace


class StaticCap:
    """``static``: at most ``sessions`` active sessions; the placebo of the other gates.

    A session is active from its first turn until ``idle_s`` after its last answer.
    """

    def __init__(
        self, device_tokens: int, host_tokens: int, sessions: int = 12, idle_s: float = 120.0
    ) -> None:
        self.sessions = sessions
        self.idle_s = idle_s
        self._until: dict[Hashable, float] = {}
        """Active sessions and when each expires; infinity while a turn runs."""

    def enter(self, turn: Turn, now: float) -> bool:
        session = turn.number if turn.session is None else turn.session
        for name in [s for s, until in self._until.items() if until <= now]:
            del self._until[name]
        if session not in self._until and len(self._until) >= self.sessions:
            return False
        self._until[session] = math.inf
        return True

    def ended(self, turn: Turn, tokens: int, now: float) -> None:
        if turn.session is None:
            del self._until[turn.number]
        else:
            self._until[turn.session] = now + self.idle_s

    def wake_at(self, now: float) -> float:
        return min(self._until.values(), default=now)

    def seniority(self, number: int) -> int | None:
        return None


class RandomCap(StaticCap):
    """``random``: as ``static``, but admits a random held turn."""

    def __init__(
        self,
        device_tokens: int,
        host_tokens: int,
        sessions: int = 12,
        idle_s: float = 120.0,
        seed: int = 0,
    ) -> None:
        super().__init__(device_tokens, host_tokens, sessions, idle_s)
        self._draw = random.Random(seed)
        self._refused: dict[int, Turn] = {}
        self._chosen: int | None = None

    def enter(self, turn: Turn, now: float) -> bool:
        if turn.session in self._until:
            return super().enter(turn, now)
        self._refused.setdefault(turn.number, turn)
        if self._chosen is None:
            self._chosen = self._draw.choice(list(self._refused))
        if turn.number != self._chosen or not super().enter(turn, now):
            return False
        del self._refused[turn.number]
        self._chosen = None
        return True

    def wake_at(self, now: float) -> float:
        free = sum(until > now for until in self._until.values()) < self.sessions
        return now if free else super().wake_at(now)


class RandomOrder:
    """``random``: shuffled before every step."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)

    def order(
        self, waiting: Sequence[SimulatedRequest], view: QueueView
    ) -> Sequence[SimulatedRequest]:
        shuffled = list(waiting)
        self._draw.shuffle(shuffled)
        return shuffled


class ProtectedAtRandom(ProtectedByPlace):
    """``random-paths``: the placebo; as many paths, drawn from the whole tree."""

    def __init__(self, tree: TierNodes) -> None:
        super().__init__(tree)
        self._draw = random.Random(0)

    def path_end(self, job: SimulatedRequest) -> TierNode:
        node = self.tree.root
        while node.children and (node is self.tree.root or self._draw.random() < 0.9):
            node = self._draw.choice(list(node.children.values()))
        return node


SESSION_GATES.update(static=StaticCap, random=RandomCap)
QUEUE_ORDERS["random"] = RandomOrder
WAITING_PREFIXES["random-paths"] = ProtectedAtRandom
