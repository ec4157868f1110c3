"""Load the pages of an earlier process into an empty store.

A page is loaded only below its prefix, and from a unit that exists in the files. Of two records
with one unit or key, the record nearer to its root is loaded; at equal depth, the one whose parent
comes first, then the one with the lower number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sglang_canopy.disk.index import NO_ROW, PageIndex
from sglang_canopy.disk.journal import JournalRecord
from sglang_canopy.disk.page import PAGE_FIELDS, ColumnType, PageMeta, is_valid_value
from sglang_canopy.disk.state import StoreState

MAX_ROW, MAX_UNIT = (1 << 31) - 1, (1 << 40) - 1
_FLAG_INDEXES = [i for i, kind in enumerate(PAGE_FIELDS.values()) if kind is ColumnType.FLAG]
_GROUP_INDEX = list(PAGE_FIELDS).index("group")


class _Record(NamedTuple):
    """One valid record of the index file."""

    key: bytes
    parent: int
    unit: int
    checksum: int
    meta: PageMeta


def load_pages(
    journal_records: Iterable[JournalRecord], state: StoreState, now: float
) -> tuple[list[int], list[int], bool]:
    """Fill the empty index. Returns the rows that were loaded, parents first, the row numbers of
    the file that were not, and whether the rows were renumbered."""
    group_of = {group.root: i for i, group in enumerate(state.ttl.groups)}
    records: dict[int, _Record] = {}
    children_of: dict[int, list[int]] = {}
    unloaded_rows: list[int] = []
    for file_row, *values in journal_records:
        record = _parse_record(file_row, values, group_of)
        if record is None or not state.segments.is_present(record.unit):
            unloaded_rows.append(file_row)
        else:
            records[file_row] = record
            children_of.setdefault(record.parent, []).append(file_row)
    is_renumbered = max(records, default=0) > 4 * len(records) + state.units.max_units + 1024
    new_row_of = {NO_ROW: NO_ROW}  # by row number of the file
    used_units: set[int] = set()
    index, future_uses = state.index, 0
    queue = deque(children_of.get(NO_ROW, ()))
    while queue:
        file_row = queue.popleft()
        record = records[file_row]
        if record.unit in used_units or record.key in index.row_of:
            continue
        used_units.add(record.unit)
        queue.extend(children_of.get(file_row, ()))
        new_row_of[file_row] = row_number = len(new_row_of) - 1 if is_renumbered else file_row
        meta = record.meta
        future_uses += meta.last_access > now
        meta.created, meta.last_access = min(meta.created, now), min(meta.last_access, now)
        index.insert(record.key, new_row_of[record.parent], record.unit, row_number)
        index.set_checksum(row_number, record.checksum)
        index.write_meta(row_number, meta)
    index.free_unloaded_rows()
    if future_uses:
        state.faults.record("clock", f"{future_uses} pages were used in the future", future_uses)
    unloaded_rows += [file_row for file_row in records if file_row not in new_row_of]
    del new_row_of[NO_ROW]
    return list(new_row_of.values()), unloaded_rows, is_renumbered


def _parse_record(file_row: Any, values: list[Any], group_of: dict[int, int]) -> _Record | None:
    """Return the record, or ``None`` if a value of it is impossible."""
    key, parent, unit, checksum, *fields = values
    is_valid = (
        0 <= file_row <= MAX_ROW
        and type(key) is type(checksum) is bytes
        and (len(key), len(checksum)) == (32, 16)
        and type(parent) is type(unit) is int
        and 0 <= unit <= MAX_UNIT
    )
    if not is_valid:
        return None
    for i in _FLAG_INDEXES:
        fields[i] = bool(fields[i]) if fields[i] in (0, 1) else fields[i]
    root = fields[_GROUP_INDEX]
    root_id = int.from_bytes(root, "little") if type(root) is bytes else -1
    fields[_GROUP_INDEX] = group_of.get(root_id, -1)
    if not all(map(is_valid_value, PAGE_FIELDS, fields)):
        return None
    meta = PageMeta(*fields)
    return _Record(key, parent, unit, int.from_bytes(checksum, "little"), meta)


def restore_uses(index: PageIndex, rows: Sequence[int]) -> None:
    """Raise the last use of each page to that of its children: the journal often has only the
    last page's use. ``rows``: parents first."""
    last_uses, parents = index.last_access, index.parent
    for row in reversed(rows):
        parent = parents[row]
        if parent != NO_ROW and last_uses[row] > last_uses[parent]:
            last_uses[parent] = last_uses[row]
