"""Registered documents in prompts without marks: found by their tokens.

A rolling hash of every ``WINDOW`` tokens of a prompt (Karp and Rabin 1987, modulo 2^64) is looked up among
those of one window of each of the tenant's documents, and what is found is compared token by token. A
tokenizer joins characters across a document's ends, so its first and last ``SEAM`` tokens may differ by
what stands beside it. They are computed with the prompt: what is reused is the same at every place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

WINDOW, SEAM = 32, 2
LEAST = 64
"""Shorter documents are not looked for."""

_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)
Ids = tuple[int, ...]


def inner(ids: Ids) -> Ids:
    """What is reused of a document that is found: all but its ends."""
    return ids[SEAM:-SEAM]


def window_hashes(ids: Sequence[int]) -> np.ndarray:
    """``[n - WINDOW + 1]`` uint64: of every run of ``WINDOW`` tokens of ``ids [n]``."""
    count = len(ids) - WINDOW + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    powers = _powers(_BASE, len(ids))
    summed = np.cumsum((np.asarray(ids, np.uint64) + np.uint64(1)) * powers, dtype=np.uint64)
    summed = np.concatenate([np.zeros(1, np.uint64), summed])
    return (summed[WINDOW:] - summed[:count]) * _powers(_INVERSE, count)


def _powers(base: int, count: int) -> np.ndarray:
    return np.cumprod(np.full(count, base, np.uint64), dtype=np.uint64)


@dataclass(slots=True)
class _Table:
    """One tenant's documents by the hash of their window behind the seam; the hashes, sorted."""

    documents: dict[int, list[Ids]] = field(default_factory=dict)
    hashes: np.ndarray | None = None


class Finder:
    """What is looked for, by tenant: as many documents as are registered, which is bounded."""

    def __init__(self) -> None:
        self._tables: dict[str | None, _Table] = {}

    def add(self, ids: Ids, tenant: str | None, least: int = 1) -> bool:
        """Look for a document from now on; whether it is long enough, ``least`` tokens without its ends."""
        if len(ids) < LEAST or len(inner(ids)) < least:
            return False
        table = self._tables.setdefault(tenant, _Table())
        known = table.documents.setdefault(_hash_of(ids), [])
        if ids not in known:
            known.append(ids)
            table.hashes = None
        return True

    def remove(self, ids: Ids, tenant: str | None) -> None:
        """Look for it no more."""
        table = self._tables.get(tenant)
        if table is None or len(ids) < LEAST:
            return
        known = table.documents.get(_hash_of(ids), [])
        if ids in known:
            known.remove(ids)
            table.hashes = None
            if not known:
                del table.documents[_hash_of(ids)]
            if not table.documents:
                del self._tables[tenant]

    def find(self, ids: Sequence[int], tenant: str | None, most: int) -> list[int]:
        """Flat bounds of what is reused of a prompt, in order and apart, ``most`` documents at most."""
        table = self._tables.get(tenant)
        if table is None:
            return []
        if table.hashes is None:
            table.hashes = np.sort(np.fromiter(table.documents, np.uint64))
        hashes = window_hashes(ids)
        bounds: list[int] = []
        for at in np.flatnonzero(np.isin(hashes, table.hashes)).tolist():
            if len(bounds) == 2 * most or at < (bounds[-1] if bounds else 0):
                continue
            documents = map(inner, table.documents[int(hashes[at])])
            ends = [at + len(one) for one in documents if tuple(ids[at : at + len(one)]) == one]
            if ends:
                bounds += [at, max(ends)]
        return bounds


def _hash_of(ids: Ids) -> int:
    return int(window_hashes(ids[SEAM : SEAM + WINDOW])[0])
