"""The random draws that both generators make."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from random import Random

from synthetic.presets import LogNormal

OUTPUT_TOKENS_PER_S = 80.0
"""Speed at which an answer streams; the next turn starts after its end (assumption)."""


def draw_tokens(rng: Random, tokens: LogNormal) -> int:
    """Draw a log-normal number of tokens, at least 1."""
    return max(1, round(tokens.median * math.exp(rng.gauss(0.0, tokens.sigma))))


def cumulate(weights: Sequence[float]) -> list[float]:
    """Return running sums of ``weights``, scaled to end at 1; for ``choose_index``."""
    total = sum(weights)
    return [w / total for w in itertools.accumulate(weights)]


def choose_index(rng: Random, cumulative_weights: Sequence[float]) -> int:
    """Draw an index with the weights that ``cumulate`` received."""
    return min(bisect_right(cumulative_weights, rng.random()), len(cumulative_weights) - 1)
