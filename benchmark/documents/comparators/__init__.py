"""Comparators for Canopy's documents: CacheTune's baselines and controls, by name."""

from __future__ import annotations

from canopy_documents.fuse.selectors import SELECTORS as SERVED
from canopy_documents.fuse.selectors.base import Selector
from comparators.deviation import Deviation, Oracle
from comparators.offline import Epic, FirstTokens, HighFrequency, Random, ValueNorm
from comparators.prophetkv import ProphetKV
from sglang_canopy.errors import CanopyError

CLASSES: tuple[type[Selector], ...] = (
    *SERVED.values(),
    *(HighFrequency, Random, ValueNorm, FirstTokens, Epic, Deviation, ProphetKV, Oracle),
)
SELECTORS = {selector_class.name: selector_class for selector_class in CLASSES}


def make_selector(name: str) -> Selector:
    """Return a selector by name. Raises CanopyError."""
    if name not in SELECTORS:
        raise CanopyError(f"selector {name!r} is not known; allowed are {', '.join(SELECTORS)}")
    return SELECTORS[name]()
