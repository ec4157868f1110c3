"""What the disk store counts. Plain numbers that only grow; exporters read them."""

from __future__ import annotations

import dataclasses
import logging
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

logger = logging.getLogger("sglang_canopy.disk")

RESIDENCY_EDGES_S = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
"""Upper edges of the residency histogram, in seconds; one more bucket holds the rest."""

REASONS = ("capacity", "ttl", "quota", "trim", "corrupt", "cleared")
"""Why a page left the disk."""

FAULTS = (
    "full",
    "read-only",
    "io",
    "corrupt",
    "index",
    "clock",
    "locked",
    "gone",
    "internal",
)
"""Every kind of fault that is answered by recomputation."""

_MAX_CATEGORIES = 512


@dataclass(slots=True)
class StoreCounters:
    """Pages unless the name says otherwise."""

    written: int = 0
    written_bytes: int = 0
    """Bytes that went into segment files."""
    present: int = 0
    """Offered for writing and on disk already."""
    refused: Counter[str] = field(default_factory=Counter)
    """Not written, by reason: ``no-prefix``, ``capacity``, ``quota``, or a fault."""
    read: int = 0
    read_bytes: int = 0
    lookups: int = 0
    """Pages asked for by ``leading``."""
    found: int = 0
    """Of those, pages that led to a hit."""
    expired_lookups: int = 0
    """Of the rest, pages that were on disk past their TTL."""
    evicted: Counter[str] = field(default_factory=Counter)
    """By reason, see ``REASONS``."""
    evicted_bytes: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    """Pages read, by category (the first 512 categories; then ``*``)."""
    misses: Counter[str] = field(default_factory=Counter)
    """Pages offered for writing that were not on disk, by category."""
    residency_s: list[int] = field(default_factory=lambda: [0] * (len(RESIDENCY_EDGES_S) + 1))
    """Pages that left, by how long they were on disk."""
    page_seconds: float = 0.0
    """The same as a sum, over the pages that left."""
    pinned: int = 0
    pins_refused: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    """By kind, see ``FAULTS``."""
    orphans: int = 0
    """Pages' worth of data without an index row, swept at start."""
    dropped_at_start: int = 0
    """Index rows that were not usable: no prefix, or no data behind them."""

    def left(self, reason: str, page_bytes: int, stay_s: float) -> None:
        """A page left the disk after ``stay_s`` seconds."""
        self.evicted[reason] += 1
        self.evicted_bytes[reason] += page_bytes
        self.page_seconds += max(0.0, stay_s)
        self.residency_s[bisect_left(RESIDENCY_EDGES_S, stay_s)] += 1

    def all_left(self, reason: str, page_bytes: int, stays_s: Any) -> None:
        """``left`` for many pages at once: an array of their seconds here."""
        self.evicted[reason] += len(stays_s)
        self.evicted_bytes[reason] += page_bytes * len(stays_s)
        self.page_seconds += float(np.maximum(stays_s, 0.0).sum())
        buckets = np.bincount(
            np.searchsorted(RESIDENCY_EDGES_S, stays_s), minlength=len(self.residency_s)
        )
        for i, pages in enumerate(buckets.tolist()):
            self.residency_s[i] += pages

    @staticmethod
    def by_category(counter: Counter[str], category: str) -> None:
        """Count one page; a flood of category names ends in ``*``."""
        if category not in counter and len(counter) >= _MAX_CATEGORIES:
            category = "*"
        counter[category] += 1

    def to_json(self) -> dict[str, Any]:
        return {
            f.name: dict(value)
            if isinstance(value := getattr(self, f.name), Counter)
            else list(value)
            if isinstance(value, list)
            else value
            for f in dataclasses.fields(self)
        }


class Faults:
    """Logs the first fault of a kind and counts them all."""

    def __init__(self, counters: StoreCounters, where: str) -> None:
        self._counters = counters
        self._where = where

    def note(self, kind: str, what: object, times: int = 1) -> None:
        assert kind in FAULTS, kind
        if not self._counters.faults[kind]:
            logger.warning(
                "Disk store %s: %s: %s. Pages are recomputed instead; this is said once, and "
                "counted as fault %r.",
                self._where,
                kind,
                what,
                kind,
            )
        self._counters.faults[kind] += times
