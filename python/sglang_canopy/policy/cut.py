"""The number of tokens evicted from a victim: one rule for the live tree and both simulators."""

from __future__ import annotations

QUANTUM_TOKENS = 64
"""Default minimum of tokens that an eviction takes from a victim."""


def tokens_kept(
    length: int, keep: int, need: int, *, page: int, quantum: int, whole_nodes: bool
) -> int:
    """Return the number of leading tokens kept of a victim of ``length`` tokens, a multiple of
    ``page``.

    ``keep``: tokens that the policy keeps, rounded up to a page. ``need``: tokens still to be
    freed. Evicts the needed tokens, but at least ``quantum``; with ``whole_nodes``, all tokens
    except ``keep``. The last page is always evicted.
    """
    kept = -(-keep // page) * page
    if not whole_nodes:
        # Round down to whole pages: rounding up would leave a remainder, and cut another node.
        spare = (length - (need if need > quantum else quantum)) // page * page
        if spare > kept:
            kept = spare
    most = (length - 1) // page * page
    return kept if kept < most else most
