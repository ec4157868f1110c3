"""How much of a victim is evicted: one rule for the live tree and both simulators."""

from __future__ import annotations

QUANTUM_TOKENS = 64
"""Least tokens that an eviction takes from a victim, unless a server is told otherwise."""


def tokens_kept(
    length: int, keep: int, need: int, *, page: int, quantum: int, whole_nodes: bool
) -> int:
    """How many leading tokens of a victim of ``length`` tokens stay; a multiple of ``page``.

    ``keep`` tokens are what the policy wants kept, rounded up to a page. ``need`` tokens are still
    to be freed. Only as much goes as is needed, and at least ``quantum`` tokens; with
    ``whole_nodes`` all goes but ``keep``. At least the last page always goes.
    """
    kept = -(-keep // page) * page
    if not whole_nodes:
        # Down to whole pages: up would leave a remainder for which another node is cut.
        spare = (length - (need if need > quantum else quantum)) // page * page
        if spare > kept:
            kept = spare
    most = (length - 1) // page * page
    return kept if kept < most else most
