"""Leaves that a policy reranks after a fit, in slices."""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import attrgetter

from sglang_canopy.records import Leaf

SLICE_LEAVES = 4096
"""Leaves in one slice: about ten milliseconds of work."""


class Reranking:
    """Reranks all leaves at once if one slice holds them, else a slice at each new time of the
    requests. Until its turn a leaf keeps its rank of the previous fit. Slices follow the order of
    creation (``Leaf.number``), so that equal requests give equal slices; leaves put back come
    first."""

    def __init__(self) -> None:
        self._pending: dict[Leaf, None] = {}
        self._last_slice_at = -math.inf

    def __bool__(self) -> bool:
        return bool(self._pending)

    def begin(self, leaves: Iterable[Leaf]) -> None:
        """Start to rerank all of ``leaves``."""
        self._pending = dict.fromkeys(sorted(leaves, key=attrgetter("number"), reverse=True))
        self._last_slice_at = -math.inf

    def due_leaves(self, now: float) -> list[Leaf]:
        """Return the leaves to rerank at ``now``, each once."""
        pending = self._pending
        if now <= self._last_slice_at:
            return []
        self._last_slice_at = now
        return [pending.popitem()[0] for _ in range(min(SLICE_LEAVES, len(pending)))]

    def discard(self, leaf: Leaf) -> None:
        """Remove ``leaf``, which was dropped; it gets a new rank if it is admitted again."""
        self._pending.pop(leaf, None)

    def put_back(self, leaf: Leaf) -> None:
        """Rerank ``leaf``: it may have been restored with a rank of the previous fit."""
        self._pending[leaf] = None
