"""How often what clients say about their future came true."""

from __future__ import annotations

import heapq
from typing import Any, Protocol

_SLACK = 0.5
_SLACK_MIN_S = 5.0
_BOUND = 100_000
"""Hints followed up at once; older ones count as settled."""


class Hinted(Protocol):
    """A tip that a hint was given for."""

    born: float
    return_at: float | None
    said_over: bool


def return_slack_s(hint_s: float) -> float:
    """Seconds around the hinted return within which the hint "in ``hint_s``" counts as true."""
    return max(_SLACK_MIN_S, _SLACK * hint_s)


class HintRecord:
    """Counts of hints and of those that came true, and what to make of the next one."""

    def __init__(self) -> None:
        self.returns = 0
        self.returns_true = 0
        self.overs = 0
        self.overs_wrong = 0
        self._open: list[tuple[float, int, Hinted]] = []
        self._count = 0

    def say_over(self, tip: Hinted) -> None:
        """A client said that nothing continues ``tip``."""
        if not tip.said_over:
            tip.said_over = True
            self.overs += 1

    def say_return(self, tip: Hinted, in_s: float) -> None:
        """A client said that ``tip`` is continued ``in_s`` seconds after its birth."""
        if tip.return_at is not None or not 0 <= in_s < float("inf"):
            return
        tip.return_at = tip.born + in_s
        self._count += 1
        heapq.heappush(self._open, (tip.return_at + return_slack_s(in_s), self._count, tip))
        if len(self._open) > _BOUND:
            heapq.heappop(self._open)

    def continued(self, tip: Hinted, now: float) -> None:
        """``tip`` was continued: check what was said about it."""
        self.overs_wrong += tip.said_over
        if tip.return_at is not None:
            self.returns += 1
            off_s = abs(now - tip.return_at)
            self.returns_true += off_s <= return_slack_s(tip.return_at - tip.born)
            tip.return_at = None

    def settle(self, now: float) -> None:
        """Count the returns that are overdue as not true."""
        while self._open and self._open[0][0] < now:
            tip = heapq.heappop(self._open)[2]
            if tip.return_at is not None:
                tip.return_at = None
                self.returns += 1

    def return_probability(self) -> float:
        """P(a client returns about when it said); two of three before anything is known."""
        return (self.returns_true + 2.0) / (self.returns + 3.0)

    def over_trusted(self) -> bool:
        """Whether "this conversation is over" has been true often enough to act on."""
        return self.overs_wrong <= 2 + 0.1 * self.overs

    def stats(self) -> dict[str, Any]:
        return {
            "returns": self.returns,
            "returns_true": self.returns_true,
            "overs": self.overs,
            "overs_wrong": self.overs_wrong,
        }
