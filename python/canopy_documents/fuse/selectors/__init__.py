"""Selectors by name, as in options and requests."""

from __future__ import annotations

from canopy_documents.fuse.selectors.base import OfflineSelector, Selector, SelectorInput
from canopy_documents.fuse.selectors.frequency import FrequencySelector
from canopy_documents.fuse.selectors.question import QuestionSelector
from sglang_canopy.errors import CanopyError

SELECTORS: dict[str, type[Selector]] = {s.name: s for s in (QuestionSelector, FrequencySelector)}


def make_selector(name: str) -> Selector:
    """Return the selector of that name. Raises CanopyError."""
    if name not in SELECTORS:
        raise CanopyError(f"selector {name!r} is not known; allowed are {', '.join(SELECTORS)}")
    return SELECTORS[name]()


__all__ = ["SELECTORS", "OfflineSelector", "Selector", "SelectorInput", "make_selector"]
