"""The document fields of a request's ``custom_params``: parsed and checked.

The HTTP process answers faults with status 400, before the request reaches the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from canopy_documents import SELECTORS, SPLIT_SELECTORS
from sglang_canopy.errors import CanopyError
from sglang_canopy.wire.stamp import BOUNDS, DOCUMENTS, ORDER, RATIO, SELECTOR

Bounds = tuple[tuple[int, int], ...]
"""Start and end of each document of a prompt, in order."""
MAX_CHUNKS = 256
"""Documents of a prompt above which it is computed in full."""


@dataclass(frozen=True, slots=True)
class DocumentFields:
    """One request's document fields.

    bounds: ``None`` if not given; off: the request declines reuse; documents_in_parts: text
    parts of its messages are documents; any_order: the documents may come in any order.
    """

    bounds: Bounds | None = None
    off: bool = False
    ratio: float | None = None
    selector: str | None = None
    documents_in_parts: bool = False
    any_order: bool = False


def parse_fields(custom_params: Any) -> DocumentFields:
    """Return the document fields of ``custom_params``. Raises CanopyError naming the key."""
    if not isinstance(custom_params, Mapping):
        return DocumentFields()
    given = custom_params.get(BOUNDS)
    off = given == "off"
    return DocumentFields(
        bounds=None if given is None or off else check_bounds(given),
        off=off,
        ratio=_ratio(custom_params.get(RATIO)),
        selector=_selector(custom_params.get(SELECTOR)),
        documents_in_parts=_parts(custom_params.get(DOCUMENTS)),
        any_order=_any_order(custom_params.get(ORDER)),
    )


def check_bounds(given: Any) -> Bounds:
    """Return pairs ``(start, end)`` of a flat list, sorted and disjoint. Raises CanopyError."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        _refuse(BOUNDS, 'a flat list of token positions [start, end, ...], or "off"', given)
    if any(isinstance(x, bool) or not isinstance(x, int) for x in given):
        _refuse(BOUNDS, "a list of whole numbers", given)
    if len(given) % 2:
        _refuse(BOUNDS, f"pairs of start and end, got {len(given)} numbers", given)
    pairs = tuple(zip(given[::2], given[1::2]))
    before = 0
    for start, end in pairs:
        if start < 0 or end < 0:
            _refuse(BOUNDS, "positions from 0 on", [start, end])
        if start == end:
            raise CanopyError(
                f"custom_params key {BOUNDS!r} has an empty document at {start}; leave it out"
            )
        if start > end:
            _refuse(BOUNDS, "pairs with start before end", [start, end])
        if start < before:
            raise CanopyError(
                f"custom_params key {BOUNDS!r}: the document from {start} overlaps the one that ends "
                f"at {before}; documents must be sorted and must not overlap"
            )
        before = end
    return pairs


def check_inside(bounds: Sequence[tuple[int, int]], tokens: int) -> None:
    """Raise CanopyError if a document ends past a prompt of ``tokens``."""
    if bounds and bounds[-1][1] > tokens:
        raise CanopyError(
            f"custom_params key {BOUNDS!r}: a document ends at {bounds[-1][1]}, the prompt has "
            f"{tokens} tokens"
        )


def check_selector(selector: str | None, tp_size: int) -> None:
    """Raise CanopyError for a selector on which ranks of a split model would not agree."""
    if selector is not None and tp_size > 1 and selector not in SPLIT_SELECTORS:
        _refuse(SELECTOR, f"one of {', '.join(SPLIT_SELECTORS)} with --tp-size {tp_size}", selector)


def _ratio(value: Any) -> float | None:
    if value is None:
        return None
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not ok or not 0.0 <= value <= 1.0:
        _refuse(RATIO, "a number from 0 (reuse all) to 1 (recompute all)", value)
    return float(value)


def _selector(value: Any) -> str | None:
    if value is not None and value not in SELECTORS:
        _refuse(SELECTOR, f"one of {', '.join(SELECTORS)}", value)
    return value


def _parts(value: Any) -> bool:
    if value not in (None, "parts"):
        _refuse(
            DOCUMENTS, '"parts": every text part of a message but its last is a document', value
        )
    return value == "parts"


def _any_order(value: Any) -> bool:
    if value not in (None, "any"):
        _refuse(ORDER, '"any": the documents may come in any order', value)
    return value == "any"


def _refuse(key: str, allowed: str, value: Any) -> None:
    text = repr(value)
    shown = text if len(text) <= 60 else text[:57] + "..."
    raise CanopyError(f"custom_params key {key!r} must be {allowed}, got {shown}")
