"""Load the pages of an earlier process into an empty store, a column at a time.

A page is loaded only below its prefix, and from a unit that exists in the files. Of two records
with one unit or key, the record with the lower row number is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sglang_canopy.disk import columns
from sglang_canopy.disk.index import NO_ROW, PageIndex
from sglang_canopy.disk.journal import FIELDS, Row
from sglang_canopy.disk.page import FIELDS as PAGE_FIELDS
from sglang_canopy.disk.page import LABELS
from sglang_canopy.disk.state import StoreState

MAX_ROW, MAX_UNIT = (1 << 31) - 1, (1 << 40) - 1
_NUMBERS = tuple(name for name in PAGE_FIELDS if name not in LABELS and name != "group")
_OF_INDEX = ("unit", "check_low", "check_high", "written")
_I8 = np.iinfo("i8")


class Records:
    """The index file's records by column. Columns are equally long; ``sound`` is a mask."""

    def __init__(self, chunks: Iterable[Sequence[Row]], roots: dict[int, int]) -> None:
        """``roots``: the root of each group of the TTL table -> group."""
        self.keys: list[bytes] = []
        self._roots = roots
        self.labels = {name: columns.LabelColumn(name) for name in LABELS}
        parts: dict[str, list[Any]] = {}
        for rows in chunks:
            for name, array in self._checked(dict(zip(FIELDS, zip(*rows)))).items():
                parts.setdefault(name, []).append(array)
        self.columns = {name: np.concatenate(arrays) for name, arrays in parts.items()}
        self.sound = self.columns.pop("sound", np.zeros(0, bool))
        """Whether the row's number, key, parent, unit, checksum and time are valid."""
        self.valid = self.columns.pop("valid", self.sound)
        """Whether the page's record is valid too."""

    def __len__(self) -> int:
        return len(self.keys)

    def _checked(self, values: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        sound: list[Any] = []
        for name, (low, high) in (
            ("id", (0, MAX_ROW)),
            ("parent", (_I8.min, _I8.max)),
            ("unit", (0, MAX_UNIT)),
        ):
            found[name], ok = columns.whole(values[name], low, high)
            sound.append(ok)
        found["written"], ok = columns.finite(values["written"])
        keys, ok_keys = columns.raw(values["key"], 32)
        checksums, ok_checksums = columns.raw(values["checksum"], 16)
        self.keys.extend(keys)
        halves = np.frombuffer(b"".join(checksums), "<u8").reshape(-1, 2)
        found["check_low"], found["check_high"] = halves[:, 0], halves[:, 1]
        sound += [ok, ok_keys, ok_checksums, found["parent"] != found["id"]]
        found["sound"] = np.logical_and.reduce(sound)
        valid = [found["sound"]]
        for name in _NUMBERS:
            found[name], ok = columns.field(name, values[name])
            valid.append(ok)
        for name, labels in self.labels.items():
            found[name], ok = labels.add(values[name])
            valid.append(ok)
        found["valid"] = np.logical_and.reduce(valid)
        found["group"] = self._groups(values["group"])
        return found

    def _groups(self, values: tuple[Any, ...]) -> Any:
        if values.count(None) == len(values):
            return np.full(len(values), -1)
        groups = {
            root: self._roots.get(int.from_bytes(root, "little"), -1)
            for root in set(values)
            if isinstance(root, bytes)
        }
        return np.asarray([groups.get(root, -1) for root in values])

    def reachable(self, usable: Any) -> tuple[Any, Any]:
        """Return a mask of the usable rows whose ancestors are all usable, and each row's depth."""
        count, ids = len(self), self.columns["id"]
        root, nowhere = count, count + 1
        parents = self.columns["parent"]
        up = np.minimum(np.searchsorted(ids, parents), max(count - 1, 0))
        up = np.where(ids[up] == parents, up, nowhere)
        up[parents == NO_ROW] = root
        up = np.append(np.where(usable, up, nowhere), [root, nowhere])
        depth = np.append(np.ones(count, np.int64), [0, 0])
        for _ in range(count.bit_length() + 1):  # each pass doubles the distance
            depth += depth[up]
            up = up[up]
        return up[:count] == root, depth[:count]

    def loadable(self, usable: Any) -> Any:
        """Return the positions of the usable rows with usable ancestors, parents first; of several
        rows with one unit or key, only one."""
        usable = usable.copy()
        while True:
            reached, depth = self.reachable(usable)
            found = np.flatnonzero(reached)
            twice = np.ones(len(found), bool)
            twice[np.unique(self.columns["unit"][found], return_index=True)[1]] = False
            first = dict(zip((self.keys[at] for at in found[::-1].tolist()), found[::-1].tolist()))
            if len(first) < len(found):
                twice |= ~np.isin(found, np.fromiter(first.values(), np.int64, len(first)))
            if not twice.any():
                return found[np.argsort(depth[found], kind="stable")]
            usable[found[twice]] = False


def load(records: Records, state: StoreState, now: float) -> tuple[list[int], list[int], bool]:
    """Fill the empty index. Returns the rows that were loaded, parents first, the row numbers of
    the file that were not, and whether the rows were renumbered."""
    columns_, index = records.columns, state.index
    if not len(records):
        return [], [], False
    ids, units = columns_["id"], columns_["unit"]
    there = records.sound.copy()
    there[there] = state.segments.present(units[there])
    greatest = int(ids[there].max()) if there.any() else 0
    renumbers = greatest > 4 * int(there.sum()) + state.units.limit + 1024
    at = records.loadable(there & records.valid)
    rows = np.arange(len(at)) if renumbers else ids[at]
    number = np.full(len(records) + 1, NO_ROW)  # the last entry is the parent of the roots
    number[at] = rows
    parents = np.searchsorted(ids, columns_["parent"][at])
    parents[columns_["parent"][at] == NO_ROW] = len(records)
    taken = {name: columns_[name][at] for name in (*_OF_INDEX, *_NUMBERS, "group")}
    taken["parent"] = number[parents]
    in_future = int(((taken["last_access"] > now) | (taken["written"] > now)).sum())
    for name in ("last_access", "created", "written"):
        taken[name] = np.minimum(taken[name], now)
    labels = {name: (records.labels[name].distinct, columns_[name][at]) for name in LABELS}
    index.load([records.keys[i] for i in at.tolist()], rows, taken, labels)
    if in_future:
        state.faults.note("clock", f"{in_future} pages were used in the future", in_future)
    for tenant, pages in index.labels["tenant"].uses().items():
        state.evictable.charge_tenant(tenant, pages)
    left_out = np.ones(len(records), bool)
    left_out[at] = False
    return rows.tolist(), ids[left_out].tolist(), renumbers


def restore_uses(index: PageIndex, rows: Sequence[int]) -> None:
    """Raise the last use of each page to that of its children: often only ends are committed.
    ``rows``: parents first."""
    last, parents = index.array["last_access"].tolist(), index.array["parent"].tolist()
    for row in reversed(rows):
        parent = parents[row]
        if parent != NO_ROW and last[row] > last[parent]:
            last[parent] = last[row]
    index.array["last_access"][:] = last
