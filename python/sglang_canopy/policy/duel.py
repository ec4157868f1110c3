"""Which of several rankings hits most on this traffic, found with sampled shadow caches.

Set dueling (Qureshi et al., ISCA 2007) with whole conversations as the sample: every ranking runs
a small cache of its own over the same sampled requests, its capacity scaled by the sampled share
as SHARDS does (Waldspurger et al., FAST 2015), and the real cache follows the one that saves most
prompt tokens. Only the requests and their stamps decide, so that all ranks follow alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.shadow_cache import ShadowCache
from sglang_canopy.records import Request

MOST_PER_S = 8.0
"""Sampled requests a second, on average over a minute, above which half of the sample goes."""

_MEMORY_REQUESTS = 1000.0
"""A request's weight halves in about 0.7 times as many sampled requests."""
_MARGIN = 0.001
"""Share of the prompt tokens by which a challenger must be ahead."""
_HOLD_REQUESTS = 32
"""Least sampled requests between two switches."""
_MASK = (1 << 64) - 1


class Duel:
    """Shadow caches for ``arms`` (name -> a fresh policy), and which of them is ``winner``.

    ``start`` is followed until another one is ahead by more than ``margin`` of the prompt tokens.
    """

    def __init__(
        self,
        arms: Mapping[str, Callable[[], Policy]],
        start: str,
        *,
        most_per_s: float = MOST_PER_S,
        memory_requests: float = _MEMORY_REQUESTS,
        margin: float = _MARGIN,
        z: float = 1.0, doubt=300,
        hold_requests: int = _HOLD_REQUESTS,
    ) -> None:
        self.winner = start
        self.capacity_tokens = 0
        self.one_in = 1
        """Of so many conversations one is sampled; doubles while the traffic is too dense."""
        self.switches = 0
        self._arms = dict(arms)
        self._caches: dict[str, ShadowCache] = {}
        self._saved = dict.fromkeys(arms, 0.0)
        self._asked = 0.0
        self._most_per_s = most_per_s
        self._keep = 1.0 - 1.0 / memory_requests
        self._margin = margin
        self._z = z; self._doubt=doubt; self._n=0
        self._ahead = dict.fromkeys(arms, 0.0)
        self._square = dict.fromkeys(arms, 0.0)
        self._hold = hold_requests
        self._since_switch = 0
        self._minute: tuple[float, int] | None = None

    def sized(self, tokens: int) -> None:
        """A tier of ``tokens`` tokens is ranked by the winner; the largest one is what counts."""
        if tokens > self.capacity_tokens:
            self.capacity_tokens = tokens
            self._caches.clear()

    def sampled(self, conversation: int) -> bool:
        """Whether a conversation, by any number that names it, is in the sample."""
        return _mixed(conversation) % self.one_in == 0

    def observe(self, request: Request) -> bool:
        """Serve a sampled request that has ended, in every shadow cache; whether the winner changed.

        Its label must be the live policy's, its path extended over the output where it is known.
        """
        if not self.capacity_tokens or not request.path:
            return False
        self._count(request.time)
        if not self._caches:
            tokens = self.capacity_tokens // self.one_in
            for name, make in self._arms.items():
                self._caches[name] = ShadowCache(make(), tokens, request.block_tokens)
        self._asked = self._asked * self._keep + request.prompt_tokens
        saved = {name: cache.access(request) for name, cache in self._caches.items()}
        for name, tokens in saved.items():
            self._saved[name] = self._saved[name] * self._keep + tokens
            d = tokens - saved[self.winner]
            self._square[name] = self._square[name] * self._keep + d * d
        return self._decide()

    def hit_ratios(self) -> dict[str, float]:
        """Share of the prompt tokens that each arm saved, recent requests weighing most."""
        asked = self._asked or 1.0
        return {name: saved / asked for name, saved in self._saved.items()}

    def _decide(self) -> bool:
        self._since_switch += 1; self._n+=1
        if self._since_switch < self._hold:
            return False
        best = max(self._saved, key=lambda name: (self._saved[name], name == self.winner))
        if self._saved[best] - self._saved[self.winner] <= (self._z + self._doubt / self._n) * self._square[best] ** .5:
            return False
        self._square = dict.fromkeys(self._square, 0.0) if 0 else {n: self._square[best] for n in self._square}
        self.winner = best
        self.switches += 1
        self._since_switch = 0
        return True

    def _count(self, now: float) -> None:
        if self._minute is None:
            self._minute = (now, 0)
        since, count = self._minute
        self._minute = (since, count + 1)
        if now - since < 60.0:
            return
        if count > self._most_per_s * (now - since):
            # Smaller caches for a smaller sample: what they held of the others would be in the way.
            self.one_in *= 2
            self._caches.clear()
        self._minute = (now, 0)


def _mixed(number: int) -> int:
    """SplitMix64's finaliser: neighbouring numbers fall apart."""
    z = (number + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
