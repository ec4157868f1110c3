"""In-memory index of the pages on disk: key -> row, and columns of metadata.

Columns are NumPy arrays for scans over all rows, with memoryviews on them for single values (several
times faster). The index file uses the same row numbers. Rows of removed pages are reused.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_canopy.disk.page import LABEL_FIELDS, OPTIONAL_FIELDS, PAGE_FIELDS, PageMeta
from sglang_canopy.records import LeafRecord

NO_ROW = -1
NO_LABEL = -1
Column = Any
"""Memoryview of one array; its values are plain ints, floats or bools."""

_STORE_COLUMNS = {
    "parent": "i4",
    "children": "i4",
    "unit": "i8",
    "check_high": "u8",
    "check_low": "u8",
    "expires": "f8",
}
COLUMNS = _STORE_COLUMNS | {name: kind.dtype for name, kind in PAGE_FIELDS.items()}
_PLAIN_FIELDS = tuple(set(PAGE_FIELDS) - {*LABEL_FIELDS, *OPTIONAL_FIELDS})
_OPTIONAL_LEAF_FIELDS = tuple(set(OPTIONAL_FIELDS) - {"ttl_s"})


class Labels:
    """Numbers for categories, conversations or tenants, assigned while any row uses the value."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._values: list[Any] = []
        self._use_counts: list[int] = []
        self._free_numbers: list[int] = []

    def __getitem__(self, number: int) -> Any:
        return self._values[number]

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, value: Hashable) -> int:
        """Return the number of ``value``, and count one more row."""
        number = self._numbers.get(value)
        if number is None:
            if self._free_numbers:
                number = self._free_numbers.pop()
                self._values[number] = value
            else:
                number = len(self._values)
                self._values.append(value)
                self._use_counts.append(0)
            self._numbers[value] = number
        self._use_counts[number] += 1
        return number

    def find_number(self, value: Hashable) -> int:
        """Return the number of ``value``, or ``NO_LABEL`` if no row uses it."""
        return self._numbers.get(value, NO_LABEL)

    def move_uses(self, numbers: Any, number: int) -> None:
        """Move one use of each number in the array ``numbers`` to ``number``."""
        unique_numbers, counts = np.unique(numbers, return_counts=True)
        self._use_counts[number] += len(numbers)
        for other, count in zip(unique_numbers.tolist(), counts.tolist()):
            self._use_counts[other] -= count - 1
            self.drop(other)

    def drop(self, number: int) -> None:
        """Count one row less. A number without rows is assigned to another value later."""
        self._use_counts[number] -= 1
        if self._use_counts[number] == 0:
            del self._numbers[self._values[number]]
            self._values[number] = None
            self._free_numbers.append(number)

    def count_uses(self) -> dict[Any, int]:
        return {value: self._use_counts[number] for value, number in self._numbers.items()}


class PageIndex:
    """Table of pages. Each column of ``COLUMNS`` is an attribute, and an array in ``arrays``. The
    columns of labels hold numbers of ``labels[name]``. Not thread-safe: the store's lock guards it."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Column: ...

    def __init__(self) -> None:
        self.row_of: dict[bytes, int] = {}
        self.key_of: list[bytes | None] = []
        self.labels = {name: Labels() for name in LABEL_FIELDS}
        self.arrays: dict[str, Any] = {name: np.zeros(0, t) for name, t in COLUMNS.items()}
        self._free_rows: list[int] = []
        self._grow(256)

    def __len__(self) -> int:
        return len(self.row_of)

    @property
    def row_slots(self) -> int:
        """Number of row slots: every row number is below it."""
        return len(self.key_of)

    def insert(self, key: bytes, parent: int, unit: int, row: int = NO_ROW) -> int:
        """Insert a page below ``parent`` (a row, or ``NO_ROW``); call ``write_meta`` next."""
        assert key not in self.row_of, key
        if row == NO_ROW:
            row = self._free_rows.pop() if self._free_rows else len(self.key_of)
        while row >= len(self.key_of):
            self.key_of.append(None)
        if row >= len(self.parent):
            self._grow(max(row + 1, 2 * len(self.parent)))
        assert self.key_of[row] is None, row
        self.row_of[key] = row
        self.key_of[row] = key
        self.parent[row] = parent
        self.children[row] = 0
        if parent != NO_ROW:
            self.children[parent] += 1
        self.unit[row] = unit
        for name in LABEL_FIELDS:
            getattr(self, name)[row] = NO_LABEL
        return row

    def remove(self, row: int) -> int:
        """Remove a page without children. Returns its parent's row."""
        key = self.key_of[row]
        assert key is not None, row
        assert self.children[row] == 0, (row, self.children[row])
        del self.row_of[key]
        self.key_of[row] = None
        self._drop_labels(row)
        self._free_rows.append(row)
        self.expires[row] = math.inf
        parent = int(self.parent[row])
        if parent != NO_ROW:
            self.children[parent] -= 1
        return parent

    def free_unloaded_rows(self) -> None:
        """Make the row numbers without a loaded page available to ``insert``."""
        self._free_rows = [
            row for row in range(self.row_slots - 1, -1, -1) if self.key_of[row] is None
        ]

    def key_at(self, row: int) -> bytes | None:
        """Return the key of a row, or ``None`` if the row is free or does not exist."""
        return self.key_of[row] if row < len(self.key_of) else None

    def checksum(self, row: int) -> int:
        return (self.check_high[row] << 64) | self.check_low[row]

    def set_checksum(self, row: int, value: int) -> None:
        self.check_high[row] = value >> 64
        self.check_low[row] = value & 0xFFFFFFFFFFFFFFFF

    def label(self, name: str, row: int) -> Any:
        """Return the row's category, conversation, tenant or source."""
        return self.labels[name][getattr(self, name)[row]]

    def write_meta(self, row: int, meta: PageMeta) -> None:
        """Set all fields of the row's page."""
        numbers = {name: labels.add(getattr(meta, name)) for name, labels in self.labels.items()}
        self._drop_labels(row)
        for name in PAGE_FIELDS:
            value = numbers[name] if name in numbers else getattr(meta, name)
            getattr(self, name)[row] = as_number(value)

    def read_meta(self, row: int) -> PageMeta:
        meta = PageMeta()
        self.fill_leaf(meta, row)
        meta.ttl_s = _or_none(self.ttl_s[row])
        return meta

    def fill_leaf(self, leaf: LeafRecord, row: int) -> None:
        """Write the row into a policy's leaf."""
        for name in _PLAIN_FIELDS:
            setattr(leaf, name, getattr(self, name)[row])
        for name in _OPTIONAL_LEAF_FIELDS:
            setattr(leaf, name, _or_none(getattr(self, name)[row]))
        for name, labels in self.labels.items():
            setattr(leaf, name, labels[getattr(self, name)[row]])

    def count_pages(self) -> dict[str, dict[Any, int]]:
        """Return the number of pages by category, by tenant and by group of the TTL table; group -1
        stands for none."""
        arrays, row_slots = self.arrays, self.row_slots
        groups = arrays["group"][:row_slots][arrays["category"][:row_slots] != NO_LABEL]
        counts = np.bincount(groups + 1)
        return {
            "categories": self.labels["category"].count_uses(),
            "tenants": self.labels["tenant"].count_uses(),
            "groups": {group - 1: count for group, count in enumerate(counts.tolist()) if count},
        }

    def _drop_labels(self, row: int) -> None:
        if self.category[row] == NO_LABEL:
            return
        for name, labels in self.labels.items():
            labels.drop(getattr(self, name)[row])
        self.category[row] = NO_LABEL

    def _grow(self, row_slots: int) -> None:
        for name, array in self.arrays.items():
            # New rows have no label, like free ones.
            grown: Any = np.full(row_slots, NO_LABEL if name == "category" else 0, array.dtype)
            grown[: len(array)] = array
            self.arrays[name] = grown
            setattr(self, name, memoryview(grown))


def as_number(value: Any) -> Any:
    """Return ``value`` as columns store it: NaN for ``None``."""
    return math.nan if value is None else value


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
