"""Which of several rankings saves most on this traffic, found with sampled shadow caches.

Set dueling (Qureshi et al., ISCA 2007) with blocks as the sample: every ranking runs a small cache
of its own over the same sampled blocks (``sampled_caches.py``), and the real cache follows the one
that saves most prompt tokens. All ranks follow alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.sampled_caches import MOST_WORK_PER_S, Arm, SampledCaches
from sglang_canopy.records import Request

_HOLD_REQUESTS = 32
"""Least sampled requests between two switches."""
_SURE = 1.5
"""Standard errors by which a challenger must be ahead, in the long run..."""
_DOUBT_REQUESTS = 300
"""... and so many of them, divided by the sampled requests seen, on top: few say little."""


def surely_ahead(ahead: float, error: float, seen: int) -> bool:
    """Whether a lead of ``ahead`` tokens with this standard error, after ``seen`` sampled requests,
    is no accident."""
    return ahead > (_SURE + _DOUBT_REQUESTS / max(seen, 1)) * error


class Duel:
    """Shadow caches for ``arms`` (name -> a fresh policy), and which of them is ``winner``.

    The first arm is followed until another one is ahead. A switch costs the real cache nothing but
    a new order: nothing is evicted for it.
    """

    def __init__(
        self,
        arms: Mapping[str, Callable[[], Policy]],
        *,
        most_work_per_s: float = MOST_WORK_PER_S,
    ) -> None:
        self.winner = next(iter(arms))
        self.capacity_tokens = 0
        self.switches = 0
        self.caches = SampledCaches(most_work_per_s=most_work_per_s)
        """Others may add caches of their own, which are fed with these."""
        self._make = dict(arms)
        self._since_switch = 0

    def sized(self, tokens: int) -> None:
        """A tier of ``tokens`` tokens is ranked by the winner. The largest tier is what counts."""
        if tokens > self.capacity_tokens:
            self.capacity_tokens = tokens
            for name, make in self._make.items():
                self.caches.add(name, Arm(make, tokens))

    def observe(self, request: Request, conversation: Hashable) -> None:
        """Serve what is sampled of an ended request in every shadow cache, and choose the winner anew.

        Its label must be the live policy's, its path extended over the output where it is known.
        """
        if self.caches.observe(request, conversation) is not None:
            self._since_switch += 1
            self._decide()

    def hit_ratios(self) -> dict[str, float]:
        """Share of the sampled prompt tokens that each arm saved; recent requests weigh most."""
        if not self.capacity_tokens:
            return dict.fromkeys(self._make, 0.0)
        return {name: self.caches.hit_ratio(name) for name in self._make}

    def stats(self) -> Mapping[str, Any]:
        """The winner, each arm's hit ratio, and how the sample is taken."""
        return {
            "winner": self.winner,
            "switches": self.switches,
            "hit_ratios": {name: round(ratio, 5) for name, ratio in self.hit_ratios().items()},
            "one_block_in": self.caches.one_in,
            "sampled_requests": self.caches.seen,
        }

    def _decide(self) -> None:
        if self._since_switch < _HOLD_REQUESTS:
            return
        saved, winner = self.caches.saved, self.winner
        best = max(self._make, key=lambda name: (saved[name], name == winner))
        if surely_ahead(*self.caches.ahead(best, winner), self.caches.seen):
            self.winner = best
            self.switches += 1
            self._since_switch = 0
