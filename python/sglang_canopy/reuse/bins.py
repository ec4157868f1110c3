"""Age bins for all curves of ``reuse/``, spaced by the square root of two.

Reuse gaps are heavy-tailed, from a fraction of a second (an agent's tool call) to hours (a person
returns), so the bins are even in the logarithm of the age.
"""

from __future__ import annotations

from bisect import bisect_right

FIRST_EDGE_S = 0.25
LAST_EDGE_S = 131072.0


def _edges() -> tuple[float, ...]:
    edges = [0.0]
    k = 0
    while True:
        # Even steps are exact powers of two: no drift, and equal floats on every machine.
        edge = FIRST_EDGE_S * 2.0 ** (k // 2) * (2.0**0.5 if k % 2 else 1.0)
        edges.append(edge)
        if edge >= LAST_EDGE_S:
            return tuple(edges)
        k += 1


EDGES: tuple[float, ...] = _edges()
"""Bin ``i`` holds ages in ``[EDGES[i], EDGES[i + 1])`` seconds; the last is unbounded."""
BINS = len(EDGES)

TOKEN_EDGES: tuple[float, ...] = (
    0.0,
    *(16.0 * 2.0 ** (k // 2) * (2.0**0.5 if k % 2 else 1.0) for k in range(33)),
)
"""Bin edges of prompt growth, in tokens: 0, then 16 to a million."""
TOKEN_BINS = len(TOKEN_EDGES)


def age_bin(age_s: float) -> int:
    """Return the bin of an age in seconds; a negative age counts as 0."""
    return bisect_right(EDGES, age_s) - 1 if age_s > 0 else 0


def token_bin(tokens: float) -> int:
    """Return the bin of a number of tokens; a negative number counts as 0."""
    return bisect_right(TOKEN_EDGES, tokens) - 1 if tokens > 0 else 0
