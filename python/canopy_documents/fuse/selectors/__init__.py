"""Selectors by name, as in options and requests."""

from __future__ import annotations

from canopy_documents.fuse.selectors.base import Offline, Selector, SelectorInput
from canopy_documents.fuse.selectors.frequency import Frequency
from canopy_documents.fuse.selectors.question import QuestionSelector
from sglang_canopy.errors import CanopyError

SELECTORS: dict[str, type[Selector]] = {kind.name: kind for kind in (QuestionSelector, Frequency)}


def make_selector(name: str) -> Selector:
    """Return the selector of that name. Raises CanopyError."""
    if name not in SELECTORS:
        raise CanopyError(f"selector {name!r} is not known; allowed are {', '.join(SELECTORS)}")
    return SELECTORS[name]()


__all__ = ["SELECTORS", "Offline", "Selector", "SelectorInput", "make_selector"]
