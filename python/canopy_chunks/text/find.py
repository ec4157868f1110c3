"""Registered documents in prompts without marks: found by their tokens.

A rolling hash of every ``WINDOW`` tokens of a prompt (Karp and Rabin 1987, modulo 2^64) is looked up among
those of the tenant's documents' beginnings; where one is, the hashes of whole documents are, by their
length. What is found is compared token by token, once: however alike documents are, a prompt does not
hold up the server. A tokenizer joins characters across a document's ends, so its first and last ``SEAM``
tokens may differ by what stands beside it. They are computed with the prompt: what is reused is the same
at every place.
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


class _Hashes:
    """Rolling hashes of the runs of ``ids [n]``: of tokens ``x``, the sum of ``(x[i] + 1) * BASE**i``."""

    def __init__(self, ids: Sequence[int]) -> None:
        powers = _powers(_BASE, len(ids))
        summed = np.cumsum((np.asarray(ids, np.uint64) + np.uint64(1)) * powers, dtype=np.uint64)
        self._sums = np.concatenate([np.zeros(1, np.uint64), summed])
        self._inverse = _powers(_INVERSE, len(ids))

    def of(self, at: np.ndarray, length: int) -> np.ndarray:
        """``[m]`` uint64: of the runs of ``length`` tokens from positions ``at [m]`` on."""
        return (self._sums[at + length] - self._sums[at]) * self._inverse[at]


def _powers(base: int, count: int) -> np.ndarray:
    return np.cumprod(np.full(count, base, np.uint64), dtype=np.uint64)


@dataclass(slots=True)
class _Registered:
    """What is looked for: the hashes of its beginning and of all of it, and the ends of the documents
    that it is the inside of."""

    beginning: int
    whole: int
    ends: set[Ids] = field(default_factory=set)


@dataclass(slots=True)
class _Table:
    """One tenant's documents by what is reused of them; their hashes, those of the whole by length."""

    documents: dict[Ids, _Registered] = field(default_factory=dict)
    beginnings: np.ndarray | None = None
    wholes: dict[int, np.ndarray] = field(default_factory=dict)

    def prepare(self) -> np.ndarray:
        """The beginnings' hashes; they and ``wholes`` are made anew after a change."""
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
    """What is looked for, by tenant: as many documents as are registered, which is bounded."""

    def __init__(self) -> None:
        self._tables: dict[str | None, _Table] = {}

    def add(self, ids: Ids, tenant: str | None, least: int = 1) -> bool:
        """Look for a document from now on; whether it is long enough, ``least`` tokens without its ends."""
        if len(ids) < LEAST or len(inner(ids)) < least:
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
        """Look for it no more."""
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
        """Flat bounds of what is reused of a prompt, in order and apart, ``most`` documents at most.
        Of several that begin at one place it is the longest."""
        table = self._tables.get(tenant)
        if table is None or len(ids) < WINDOW:
            return []
        beginnings, hashes = table.prepare(), _Hashes(ids)
        every = np.arange(len(ids) - WINDOW + 1)
        at = every[np.isin(hashes.of(every, WINDOW), beginnings)]
        if not at.size:
            return []
        lengths = np.zeros_like(at)
        for length, wholes in table.wholes.items():  # ascending: the longest stays
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
    """What of a document is not reused."""
    return ids[:SEAM] + ids[-SEAM:]
