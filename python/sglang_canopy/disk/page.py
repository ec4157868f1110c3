"""Record of one page in a lower tier: its fields, the types of their columns, and their validation."""

from __future__ import annotations

import dataclasses
import enum
import math
import operator
from dataclasses import dataclass
from typing import Any

from sglang_canopy.records import LeafRecord, copy_record

MAX_LABEL_CHARS = 256
"""Longest label (category, tenant, conversation), in characters."""
_MAX_WHOLE = 1 << 40
"""Largest valid whole number: tokens, turns, uses."""
_MAX_TIME_S = 1e13
"""Largest valid number of seconds."""


@dataclass(slots=True)
class PageMeta(LeafRecord):
    """Record of one page. Times are in seconds on the clock of the store or tree that holds it."""

    ttl_s: float | None = None
    """TTL requested for this page; ``None``: the group's TTL."""

    @classmethod
    def from_leaf(cls, leaf: LeafRecord, ttl_s: float | None = None) -> PageMeta:
        """Copy the record of ``leaf``, with labels that a file can store."""
        meta = cls(leaf.offset, leaf.length, ttl_s=ttl_s)
        copy_record(leaf, meta)
        for name in LABEL_FIELDS:
            setattr(meta, name, _make_storable(getattr(meta, name)))
        return meta

    def shift(self, seconds: float) -> None:
        """Add ``seconds`` to every time."""
        for name in _TIME_FIELDS:
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, value + seconds)


class ColumnType(enum.Enum):
    """Type of a field's column."""

    FLAG = "?"
    WHOLE = "i8"
    SECONDS = "f8"
    OPTIONAL = "f8 or NaN"
    """Seconds or milliseconds; NaN stands for ``None``."""
    LABEL = "i4"
    """Number of a text, a conversation or ``None`` (``index.Labels``)."""

    @property
    def dtype(self) -> str:
        return self.value[:2]


_COLUMN_TYPES = {
    "bool": ColumnType.FLAG,
    "int": ColumnType.WHOLE,
    "float": ColumnType.SECONDS,
    "float | None": ColumnType.OPTIONAL,
}
PAGE_FIELDS = {
    f.name: _COLUMN_TYPES.get(str(f.type), ColumnType.LABEL) for f in dataclasses.fields(PageMeta)
}
"""Fields of a page's record, in order, with the types of their columns."""
LABEL_FIELDS = tuple(name for name, kind in PAGE_FIELDS.items() if kind is ColumnType.LABEL)
OPTIONAL_FIELDS = tuple(name for name, kind in PAGE_FIELDS.items() if kind is ColumnType.OPTIONAL)
path_fields = operator.attrgetter(*(n for n in PAGE_FIELDS if n not in ("offset", "length")))
"""Function: the fields of a ``PageMeta`` that all pages of a node share, in order."""
_TIME_FIELDS = ("created", "last_access", "keep_until", "return_at")
_REQUIRED_LABELS = ("category", "source")
"""Labels that are never ``None``."""
_MIN_WHOLES = {name: -1 if name == "group" else 0 for name in PAGE_FIELDS}


def _make_storable(label: Any) -> str | int | None:
    """Return a label that a file can store: ``None``, a 64-bit int or a bounded text."""
    if label is None or (type(label) is int and -(1 << 63) <= label < 1 << 63):
        return label
    return (label if isinstance(label, str) else repr(label))[:MAX_LABEL_CHARS]


def is_valid_value(name: str, value: Any) -> bool:
    """Return whether a page's record may have this value of the field ``name``."""
    column_type = PAGE_FIELDS[name]
    if column_type is ColumnType.FLAG:
        return isinstance(value, bool)
    if column_type is ColumnType.WHOLE:
        return type(value) is int and _MIN_WHOLES[name] <= value <= _MAX_WHOLE
    if column_type is ColumnType.LABEL:
        return _is_label(
            value, may_be_none=name not in _REQUIRED_LABELS, may_be_int=name == "conversation"
        )
    if value is None:
        return column_type is ColumnType.OPTIONAL
    if name == "ttl_s":
        return type(value) in (int, float) and value >= 0  # may be infinite
    return (
        type(value) in (int, float)
        and math.isfinite(value)
        and -_MAX_TIME_S <= value <= _MAX_TIME_S
    )


def _is_label(value: Any, *, may_be_none: bool, may_be_int: bool) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_LABEL_CHARS
    if value is None:
        return may_be_none
    return may_be_int and type(value) is int and -(1 << 63) <= value < 1 << 63
