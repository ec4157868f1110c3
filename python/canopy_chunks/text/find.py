"""Registered documents in prompts without marks, found by their tokens.

A rolling hash of every ``WINDOW`` tokens of a prompt (Karp and Rabin 1987, modulo 2^64) is looked
up among the hashes of the beginnings of the tenant's documents. At a match, hashes of whole
documents are looked up by length. Each candidate is compared token by token once, so that similar
documents do not make a prompt slow. A tokenizer joins characters across a document's ends, so its
first and last ``SEAM`` tokens may depend on the neighbouring text. They are computed with the
prompt: the reused tokens are the same in every prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

WINDOW, SEAM = 32, 2
MIN_TOKENS = 64
"""Shorter documents are not searched for."""

_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)
Ids = tuple[int, ...]


def inner(ids: Ids) -> Ids:
    """Return the reused tokens of a found document: all except its ends."""
    return ids[SEAM:-SEAM]


class _Hashes:
    """Rolling hashes of runs of ``ids [n]``: the sum of ``(x[i] + 1) * BASE**i`` over a run."""

    def __init__(self, ids: Sequence[int]) -> None:
        powers = _powers(_BASE, len(ids))
        summed = np.cumsum((np.asarray(ids, np.uint64) + np.uint64(1)) * powers, dtype=np.uint64)
        self._sums = np.concatenate([np.zeros(1, np.uint64), summed])
        self._inverse = _powers(_INVERSE, len(ids))

    def of(self, at: np.ndarray, length: int) -> np.ndarray:
        """Return ``[m]`` uint64, the hashes of the runs of ``length`` tokens that start at
        positions ``at [m]``."""
        return (self._sums[at + length] - self._sums[at]) * self._inverse[at]


def _powers(base: int, count: int) -> np.ndarray:
    return np.cumprod(np.full(count, base, np.uint64), dtype=np.uint64)


@dataclass(slots=True)
class _Registered:
    """The inner tokens of registered documents: hashes of their beginnings and of the whole, and
    the documents' ends."""

    beginning: int
    whole: int
    ends: set[Ids] = field(default_factory=set)


@dataclass(slots=True)
class _Table:
    """A tenant's documents by their inner tokens, with hashes of their beginnings and, by length, of
    whole documents."""

    documents: dict[Ids, _Registered] = field(default_factory=dict)
    beginnings: np.ndarray | None = None
    wholes: dict[int, np.ndarray] = field(default_factory=dict)

    def prepare(self) -> np.ndarray:
        """Return the beginnings' hashes; after a change, recompute them and ``wholes``."""
        if self.beginnings is None:
            by_length: dict[int, list[int]] = {}
            for ids, one in self.documents.items():
                by_length.setdefault(len(ids), []).append(one.whole)
            self.wholes = {n: np.array(by_length[n], np.uint64) for n in sorted(by_length)}
            self.beginnings = np.array(
                [one.beginning for one in self.documents.values()], np.uint64
            )
        return self.beginnings


class Finder:
    """Registered documents to search for, by tenant. Their number is bounded."""

    def __init__(self) -> None:
        self._tables: dict[str | None, _Table] = {}

    def add(self, ids: Ids, tenant: str | None, least: int = 1) -> bool:
        """Search for a document from now on.

        Returns whether it is long enough: ``MIN_TOKENS`` tokens, and ``least`` without its ends.
        """
        if len(ids) < MIN_TOKENS or len(inner(ids)) < least:
            return False
        table = self._tables.setdefault(tenant, _Table())
        reused = inner(ids)
        if reused not in table.documents:
            hashes, start = _Hashes(reused), np.zeros(1, np.int64)
            beginning, whole = (int(hashes.of(start, n)[0]) for n in (WINDOW, len(reused)))
            table.documents[reused] = _Registered(beginning, whole)
            table.beginnings = None
        table.documents[reused].ends.add(_ends(ids))
        return True

    def remove(self, ids: Ids, tenant: str | None) -> None:
        """Stop searching for a document."""
        table = self._tables.get(tenant)
        registered = table.documents.get(inner(ids)) if table is not None else None
        if table is None or registered is None:
            return
        registered.ends.discard(_ends(ids))
        if not registered.ends:
            del table.documents[inner(ids)]
            table.beginnings = None
        if not table.documents:
            del self._tables[tenant]

    def find(self, ids: Sequence[int], tenant: str | None, most: int) -> list[int]:
        """Return flat, sorted, disjoint bounds of the reused tokens in a prompt, of at most
        ``most`` documents.

        If several documents begin at one position, the longest is used.
        """
        table = self._tables.get(tenant)
        if table is None or len(ids) < WINDOW:
            return []
        beginnings, hashes = table.prepare(), _Hashes(ids)
        every = np.arange(len(ids) - WINDOW + 1)
        at = every[np.isin(hashes.of(every, WINDOW), beginnings)]
        if not at.size:
            return []
        lengths = np.zeros_like(at)
        for length, wholes in table.wholes.items():  # ascending, so that the longest remains
            fits = np.flatnonzero(at <= len(ids) - length)
            lengths[fits[np.isin(hashes.of(at[fits], length), wholes)]] = length
        bounds: list[int] = []
        for start, length in zip(at[lengths > 0].tolist(), lengths[lengths > 0].tolist()):
            if len(bounds) == 2 * most:
                break
            if start < (bounds[-1] if bounds else 0):
                continue
            if tuple(ids[start : start + length]) in table.documents:
                bounds += [start, start + length]
        return bounds


def _ends(ids: Ids) -> Ids:
    """Return the tokens of a document that are not reused."""
    return ids[:SEAM] + ids[-SEAM:]
