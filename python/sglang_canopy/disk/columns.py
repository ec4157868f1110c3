"""Check and convert the columns of the index file, many rows at a time.

A column of one type is checked as an array; a column with other values, which a damaged file has,
value by value. Functions return an array, and a mask of the valid values; others become 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sglang_canopy.disk.page import FIELDS, Kind, is_sound

Checked = tuple[Any, Any]


def whole(values: Sequence[Any], low: int, high: int) -> Checked:
    """Check whole numbers from ``low`` to ``high``, both included."""
    if set(map(type, values)) == {int}:
        array = np.asarray(values)
        if array.dtype.kind == "i":
            return array, (array >= low) & (array <= high)
    return _one_by_one(values, "i8", lambda value: type(value) is int and low <= value <= high)


def finite(values: Sequence[Any]) -> Checked:
    """Check finite floats."""
    if set(map(type, values)) == {float}:
        array = np.asarray(values)
        return array, np.isfinite(array)
    return _one_by_one(values, "f8", lambda value: type(value) is float and math.isfinite(value))


def raw(values: Sequence[Any], size: int) -> tuple[list[bytes], Any]:
    """Check values of ``size`` bytes; returns a list, and the mask."""
    if set(map(type, values)) == {bytes} and set(map(len, values)) == {size}:
        return list(values), np.ones(len(values), bool)
    ok = [isinstance(value, bytes) and len(value) == size for value in values]
    return [v if good else bytes(size) for v, good in zip(values, ok)], np.asarray(ok, bool)


def field(name: str, values: Sequence[Any]) -> Checked:
    """Check a field of the pages' records that is not a label."""
    kind = FIELDS[name]
    if kind is Kind.OPTIONAL and values.count(None) == len(values):
        return np.full(len(values), math.nan), np.ones(len(values), bool)

    def valid(value: Any) -> bool:
        return is_sound(name, bool(value) if kind is Kind.FLAG and value in (0, 1) else value)

    # NumPy pads every row to the longest text, so that a column with texts is never an array.
    if {int, float, bool}.issuperset(map(type, values)):
        array = np.asarray(values)
        # Valid numbers are a range: its ends decide.
        if array.dtype.kind in ("if" if kind in (Kind.SECONDS, Kind.OPTIONAL) else "i") and all(
            valid(end.item()) for end in (array.min(), array.max())
        ):
            return array.astype(kind.column), np.ones(len(values), bool)
    return _one_by_one(values, kind.column, valid)


def _one_by_one(values: Sequence[Any], dtype: str, valid: Callable[[Any], bool]) -> Checked:
    ok = [valid(value) for value in values]
    numbers = [math.nan if v is None else v if good else 0 for v, good in zip(values, ok)]
    if dtype != "f8":
        numbers = [number if good else 0 for number, good in zip(numbers, ok)]
    return np.asarray(numbers, dtype), np.asarray(ok, bool)


class LabelColumn:
    """A column of labels: its distinct values, and the position of each row's value among them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._positions: dict[Any, int] = {}

    @property
    def distinct(self) -> list[Any]:
        return list(self._positions)

    def add(self, values: Sequence[Any]) -> Checked:
        """Check more rows; returns the positions of their values, and the mask."""
        ok = np.ones(len(values), bool)
        positions, name = self._positions, self._name
        distinct = dict.fromkeys(values)
        # Exclude floats, which may equal an integer but are not labels.
        mixed = not {str, type(None)}.issuperset(map(type, values))
        if mixed or not all(is_sound(name, value) for value in distinct):
            ok = np.asarray([is_sound(name, value) for value in values], bool)
            values = [value if good else "" for value, good in zip(values, ok)]
            distinct = dict.fromkeys(values)
        for value in distinct:
            positions.setdefault(value, len(positions))
        if len(distinct) == 1:
            return np.full(len(values), positions[values[0]]), ok
        return np.fromiter(map(positions.__getitem__, values), np.int64, len(values)), ok
