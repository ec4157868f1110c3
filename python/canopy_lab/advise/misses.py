"""Causes of missed prompt tokens in a simulated run: new text, or evictions by time since the last use."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from canopy_lab.advise.arms import Uncached
from canopy_lab.trace.record import TraceRequest

EDGES_S = (60.0, 300.0, 3600.0)
"""Upper edges of the bins of ``Misses.evicted_after``; one more bin has no edge."""


@dataclass(frozen=True, slots=True)
class Misses:
    """Shares of all prompt tokens; they sum to the miss ratio."""

    never_seen: float
    """Text of no earlier request, or of a partial last block."""
    evicted: float
    evicted_after: tuple[float, ...]
    """``evicted`` by seconds since the last use, in bins of ``EDGES_S``."""


def why_missed(requests: Sequence[TraceRequest], uncached: Uncached) -> Misses:
    """Return the causes of ``uncached``, the tokens that each of ``requests`` computes in a run."""
    last_used: dict[int, float] = {}
    after = [0] * (len(EDGES_S) + 1)
    tokens = new = 0
    for request, missed in zip(requests, uncached.tolist(), strict=True):
        size, prompt, time_s = request.block_tokens, request.input_tokens, request.time_s
        tokens += prompt
        hit = prompt - missed
        for at, block in enumerate(request.blocks):
            begin, end = max(at * size, hit), min((at + 1) * size, prompt)
            if begin < end:
                before = last_used.get(block)
                if before is None:
                    new += end - begin
                else:
                    after[bisect_left(EDGES_S, time_s - before)] += end - begin
            last_used[block] = time_s
        new += max(0, prompt - max(hit, len(request.blocks) * size))
    total = max(tokens, 1)
    return Misses(new / total, sum(after) / total, tuple(n / total for n in after))
