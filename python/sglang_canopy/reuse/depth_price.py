"""Price of a prompt's tokens by their depth, in tokens of the linear part of prefill.

A token at depth d costs c1 + c2 d seconds to prefill, whatever part of its prefix is cached: c1 for
the layers that are linear in the tokens, c2 for attention to each token before it. Decisions need
only the depth scale s = c1 / c2, the depth at which a token costs twice as much as the first. It
spans a factor of 20 between models, so it is measured (``schedule/prefill_cost.py``).
"""

from __future__ import annotations

import math

UNKNOWN = math.inf
"""Depth scale before a measurement: every token has the same price."""
MIN_SCALE, MAX_SCALE = 1_000.0, 200_000.0
"""Range of depth scales, in tokens."""
MOVED = 1.5
"""Smallest factor between two depth scales, so that noise does not change prices."""


def price(tokens: float, scale: float) -> float:
    """Return the price of a prompt's first ``tokens`` tokens."""
    return price_of_sums(tokens, tokens * tokens, scale)


def price_of_sums(tokens: float, squares: float, scale: float) -> float:
    """Return the price of the first tokens of several prompts: the sums of their numbers and of the
    numbers' squares."""
    return tokens + squares / (2.0 * scale)


def moved(scale: float, measured: float) -> float:
    """Return the depth scale to use after a measurement: ``scale``, or ``measured`` within the
    range if it differs by a factor of ``MOVED``. A measurement that is not above 0 is ignored."""
    if not measured > 0.0:
        return scale
    measured = min(max(measured, MIN_SCALE), MAX_SCALE)
    if scale / MOVED < measured < scale * MOVED:
        return scale
    return measured


class MeanPrice:
    """Mean price of a token over the latest prompts."""

    __slots__ = ("_prompts", "_squares", "_tokens")

    _KEPT = 4096
    """Prompts after which the sums are halved."""

    def __init__(self) -> None:
        self._prompts = 0
        self._tokens = self._squares = 0.0

    def add(self, prompt_tokens: int) -> None:
        self._prompts += 1
        self._tokens += prompt_tokens
        self._squares += prompt_tokens * prompt_tokens
        if self._prompts >= 2 * self._KEPT:
            self._prompts //= 2
            self._tokens /= 2.0
            self._squares /= 2.0

    def at(self, scale: float) -> float:
        """Return the mean price per token; 1 before the first prompt."""
        if not self._tokens:
            return 1.0
        return 1.0 + self._squares / (2.0 * scale * self._tokens)
