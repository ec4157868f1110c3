"""The document fields of a request's ``custom_params``: parsed and checked.

The HTTP process answers faults with status 400, before the request reaches the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.wire.stamp import BOUNDS, DOCUMENTS, ORDER, RATIO

Bounds = tuple[tuple[int, int], ...]
"""Start and end of each document of a prompt, in order."""
MAX_DOCUMENTS = 256
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
    documents_in_parts: bool = False
    any_order: bool = False


def parse_fields(custom_params: Any) -> DocumentFields:
    """Return the document fields of ``custom_params``. Raises CanopyError naming the key."""
    if not isinstance(custom_params, Mapping):
        return DocumentFields()
    bounds = custom_params.get(BOUNDS)
    off = bounds == "off"
    return DocumentFields(
        bounds=None if bounds is None or off else parse_bounds(bounds),
        off=off,
        ratio=_parse_ratio(custom_params.get(RATIO)),
        documents_in_parts=_has_word(
            custom_params,
            DOCUMENTS,
            "parts",
            "every text part of a message but its last is a document",
        ),
        any_order=_has_word(custom_params, ORDER, "any", "the documents may come in any order"),
    )


def parse_bounds(bounds: Any) -> Bounds:
    """Return pairs ``(start, end)`` of a flat list, sorted and disjoint. Raises CanopyError."""
    if not isinstance(bounds, Sequence) or isinstance(bounds, str):
        _refuse(BOUNDS, 'a flat list of token positions [start, end, ...], or "off"', bounds)
    if any(isinstance(position, bool) or not isinstance(position, int) for position in bounds):
        _refuse(BOUNDS, "a list of whole numbers", bounds)
    if len(bounds) % 2:
        _refuse(BOUNDS, f"pairs of start and end, got {len(bounds)} numbers", bounds)
    pairs = tuple(zip(bounds[::2], bounds[1::2]))
    previous_end = 0
    for start, end in pairs:
        if start < 0 or end < 0:
            _refuse(BOUNDS, "positions from 0 on", [start, end])
        if start == end:
            raise CanopyError(
                f"custom_params key {BOUNDS!r} has an empty document at {start}; leave it out"
            )
        if start > end:
            _refuse(BOUNDS, "pairs with start before end", [start, end])
        if start < previous_end:
            raise CanopyError(
                f"custom_params key {BOUNDS!r}: the document from {start} overlaps the one that ends "
                f"at {previous_end}; documents must be sorted and must not overlap"
            )
        previous_end = end
    return pairs


def check_inside(bounds: Sequence[tuple[int, int]], tokens: int) -> None:
    """Raise CanopyError if a document ends past a prompt of ``tokens``."""
    if bounds and bounds[-1][1] > tokens:
        raise CanopyError(
            f"custom_params key {BOUNDS!r}: a document ends at {bounds[-1][1]}, the prompt has "
            f"{tokens} tokens"
        )


def _parse_ratio(value: Any) -> float | None:
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0.0 <= value <= 1.0:
        _refuse(RATIO, "a number from 0 (reuse all) to 1 (recompute all)", value)
    return float(value)


def _has_word(custom_params: Mapping[str, Any], key: str, word: str, meaning: str) -> bool:
    """Return whether a key with a single allowed value is given."""
    value = custom_params.get(key)
    if value not in (None, word):
        _refuse(key, f'"{word}": {meaning}', value)
    return value == word


def _refuse(key: str, allowed: str, value: Any) -> None:
    text = repr(value)
    shown = text if len(text) <= 60 else text[:57] + "..."
    raise CanopyError(f"custom_params key {key!r} must be {allowed}, got {shown}")
