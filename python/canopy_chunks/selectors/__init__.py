"""Selectors by the names a user can type."""

from __future__ import annotations

from canopy_chunks.selectors.asked import (
    Asked,
    HeadAsked,
    HeadLastToken,
    LastToken,
)
from canopy_chunks.selectors.base import Context, Offline, SelectedTokens, Selector
from canopy_chunks.selectors.first_k import Epic, FirstTokens
from canopy_chunks.selectors.frequency import (
    Frequency,
    FrequencyNested,
    FrequencyPerLayer,
    HighFrequency,
)
from canopy_chunks.selectors.hkvd import Deviation, Oracle
from canopy_chunks.selectors.norms import ValueNorm
from canopy_chunks.selectors.prophetkv import ProphetKV
from canopy_chunks.selectors.query import HeadQuery, Query
from canopy_chunks.selectors.random import Random
from sglang_canopy.errors import CanopyError

CLASSES: tuple[type[Selector], ...] = (
    Frequency,
    FrequencyPerLayer,
    FrequencyNested,
    HighFrequency,
    Random,
    ValueNorm,
    FirstTokens,
    Epic,
    Deviation,
    ProphetKV,
    Query,
    HeadQuery,
    Asked,
    HeadAsked,
    LastToken,
    HeadLastToken,
    Oracle,
)
SELECTORS = {c.name: c for c in CLASSES}
DEFAULT = "asked"
"""What ``default`` stands for: the best measured (docs/research/chunks.md)."""


def make_selector(name: str) -> Selector:
    """The selector of that name; ``default`` is the one that ships. Raises CanopyError."""
    chosen = DEFAULT if name == "default" else name
    if chosen not in SELECTORS:
        raise CanopyError(
            f"selector {name!r} is not known; allowed are default, {', '.join(SELECTORS)}"
        )
    return SELECTORS[chosen]()


def offline_selectors() -> list[Offline]:
    """Those whose scores can be stored with a chunk."""
    return [c() for c in CLASSES if issubclass(c, Offline)]


__all__ = [
    "DEFAULT",
    "SELECTORS",
    "Context",
    "Offline",
    "SelectedTokens",
    "Selector",
    "make_selector",
    "offline_selectors",
]
