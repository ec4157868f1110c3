"""Which of several rankings saves most on this traffic, found with sampled shadow caches.

Set dueling (Qureshi et al., ISCA 2007) with whole conversations as the sample: every ranking runs
a small cache of its own over the same sampled requests, its capacity scaled by the sampled share
as SHARDS does (Waldspurger et al., FAST 2015), and the real cache follows the one that saves most
prompt tokens. Only the requests and their stamps decide, so that all ranks follow alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.shadow_cache import ShadowCache
from sglang_canopy.records import Request

MOST_PER_S = 8.0
"""Sampled requests a second, on average over a minute, above which half of the sample goes."""

MEMORY_REQUESTS = 3000
"""A sampled request's weight falls to 1/e after so many more."""

_HOLD_REQUESTS = 32
"""Least sampled requests between two switches."""
_SURE = 1.5
"""Standard errors by which a challenger must be ahead, in the long run..."""
_DOUBT_REQUESTS = 300
"""... and so many of them, divided by the sampled requests seen, on top: few say little."""
_SAMPLE_S = 60.0
_MASK = (1 << 64) - 1


class Duel:
    """Shadow caches for ``arms`` (name -> a fresh policy), and which of them is ``winner``.

    The first arm is followed until another one is ahead. A switch costs the real cache nothing but
    a new order: nothing is evicted for it.
    """

    def __init__(
        self, arms: Mapping[str, Callable[[], Policy]], *, most_per_s: float = MOST_PER_S
    ) -> None:
        self.winner = next(iter(arms))
        self.capacity_tokens = 0
        self.one_in = 1
        """Of so many conversations one is sampled; doubles while the traffic is too dense."""
        self.switches = 0
        self._make = dict(arms)
        self._caches: dict[str, ShadowCache] = {}
        self._most_per_s = most_per_s
        self._asked = 0.0
        self._saved = dict.fromkeys(arms, 0.0)
        self._squares = {name: dict.fromkeys(arms, 0.0) for name in arms}
        """Sums of the squared differences of two arms' tokens, request by request."""
        self._seen = self._since_switch = 0
        self._counted_from, self._counted = 0.0, 0

    def sized(self, tokens: int) -> None:
        """A tier of ``tokens`` tokens is ranked by the winner. The largest tier is what counts."""
        if tokens > self.capacity_tokens:
            self.capacity_tokens = tokens
            self._caches.clear()

    def samples(self, conversation: int) -> bool:
        """Whether a conversation, by any number that names it, is in the sample."""
        return _mixed(conversation) % self.one_in == 0

    def observe(self, request: Request) -> None:
        """Serve a sampled request that has ended in every shadow cache, and choose the winner anew.

        Its label must be the live policy's, its path extended over the output where it is known.
        """
        if not self.capacity_tokens or not request.path:
            return
        self._thin_out(request.time)
        if not self._caches:
            tokens = self.capacity_tokens // self.one_in
            for name, make in self._make.items():
                self._caches[name] = ShadowCache(make(), tokens, request.block_tokens)
        saved = {name: cache.access(request) for name, cache in self._caches.items()}
        keep = 1.0 - 1.0 / MEMORY_REQUESTS
        self._asked = self._asked * keep + request.prompt_tokens
        for name, tokens in saved.items():
            self._saved[name] = self._saved[name] * keep + tokens
            squares = self._squares[name]
            for other, others in saved.items():
                squares[other] = squares[other] * keep + float(tokens - others) ** 2
        self._seen += 1
        self._since_switch += 1
        self._decide()

    def hit_ratios(self) -> dict[str, float]:
        """Share of the sampled prompt tokens that each arm saved; recent requests weigh most."""
        return {name: saved / (self._asked or 1.0) for name, saved in self._saved.items()}

    def stats(self) -> Mapping[str, Any]:
        """The winner, each arm's hit ratio, and how the sample is taken."""
        return {
            "winner": self.winner,
            "switches": self.switches,
            "hit_ratios": {name: round(ratio, 5) for name, ratio in self.hit_ratios().items()},
            "one_conversation_in": self.one_in,
            "sampled_requests": self._seen,
        }

    def _decide(self) -> None:
        if self._since_switch < _HOLD_REQUESTS:
            return
        winner = self.winner
        best = max(self._saved, key=lambda name: (self._saved[name], name == winner))
        ahead = self._saved[best] - self._saved[winner]
        sure = _SURE + _DOUBT_REQUESTS / self._seen
        if ahead <= sure * math.sqrt(self._squares[best][winner]):
            return
        self.winner = best
        self.switches += 1
        self._since_switch = 0

    def _thin_out(self, now: float) -> None:
        """Halve the sample after a minute that had too many requests in it."""
        if not self._counted:
            self._counted_from = now
        self._counted += 1
        passed = now - self._counted_from
        if passed < _SAMPLE_S:
            return
        if self._counted > self._most_per_s * passed:
            self.one_in *= 2
            # What they hold of those that are no longer sampled would be in the way.
            self._caches.clear()
        self._counted = 0


def _mixed(number: int) -> int:
    """SplitMix64's finaliser, so that neighbouring numbers fall apart."""
    z = (number + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
