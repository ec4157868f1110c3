"""Comparators for Canopy's documents: CacheTune's baselines and controls, by name."""

from __future__ import annotations

from canopy_chunks.fuse.selectors import SELECTORS as SERVED
from canopy_chunks.fuse.selectors.base import Selector
from comparators.attended import HeadLastToken, HeadQuery, HeadQuestion, LastToken, Query
from comparators.deviation import Deviation, Oracle
from comparators.offline import Epic, FirstTokens, HighFrequency, Random, ValueNorm
from comparators.per_layer import FrequencyNested, FrequencyPerLayer
from comparators.prophetkv import ProphetKV
from comparators.qcfuse import QCFuse
from sglang_canopy.errors import CanopyError

CLASSES: tuple[type[Selector], ...] = (
    *SERVED.values(),
    *(FrequencyPerLayer, FrequencyNested, HighFrequency, Random, ValueNorm, FirstTokens, Epic),
    *(
        Deviation,
        ProphetKV,
        QCFuse,
        Query,
        HeadQuery,
        HeadQuestion,
        LastToken,
        HeadLastToken,
        Oracle,
    ),
)
SELECTORS = {one.name: one for one in CLASSES}


def make_selector(name: str) -> Selector:
    """Return a selector by name. Raises CanopyError."""
    if name not in SELECTORS:
        raise CanopyError(f"selector {name!r} is not known; allowed are {', '.join(SELECTORS)}")
    return SELECTORS[name]()
