"""Entries of a log of JSON lines, of one JSON list or of a table (CSV with a header).

They are yielded in the order of the file, or by time if the newest is first.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from canopy_lab.trace import lines
from canopy_lab.trace.lines import COMPRESSED, open_binary
from sglang_canopy.errors import CanopyError

_READ_BYTES = 1 << 20


def read_lines_backwards(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield ``(1-based line number, line)`` of all non-blank lines, in reverse order.

    Memory: one line and ``_READ_BYTES`` bytes. Raises ``CanopyError`` for a compressed file.
    """
    if path.suffix in COMPRESSED:
        raise CanopyError(
            f"{str(path)!r} is newest first and compressed, so it cannot be read in order of time; "
            "decompress it, or sort it by time"
        )
    with open_binary(path) as stream:
        start_offset = stream.tell()
        number = 1 + sum(part.count(b"\n") for part in iter(lambda: stream.read(_READ_BYTES), b""))
        offset, partial = stream.seek(0, io.SEEK_END), b""
        while offset > start_offset:
            size = min(offset - start_offset, _READ_BYTES)
            offset -= size
            stream.seek(offset)
            pieces = (stream.read(size) + partial).split(b"\n")
            # Unless it is the file's first line, the first piece lacks its beginning.
            partial = pieces.pop(0) if offset > start_offset else b""
            for piece in reversed(pieces):
                if piece.strip():
                    yield number, piece + b"\n"
                number -= 1


_MAX_LIST_BYTES = 1 << 30
"""Maximum bytes of a file that is one JSON list, which must be read at once."""
_MAX_CELL_BYTES = 64 << 20
_ORDER_SAMPLE_ENTRIES = 256
"""Number of entries whose times decide whether a file is newest first."""

TimeOf = Callable[[dict[str, Any]], float]
"""Time of an entry. Raises ``BadLine``."""


def read_entries(
    path: Path, tolerance: lines.Tolerance, time_of: TimeOf
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line or ordinal, entry). An entry that is not a JSON object is a broken line."""
    for number, item in _items(path, tolerance, time_of):
        try:
            yield number, _to_entry(item)
        except lines.BadLine as error:
            tolerance.count_bad(number, error)


def _items(path: Path, tolerance: lines.Tolerance, time_of: TimeOf) -> Iterator[tuple[int, Any]]:
    if path.is_dir():
        for file in lines.files_of(path):
            yield from _items(file, tolerance, time_of)
        return
    with lines.open_binary(path) as stream:
        head_byte = stream.read(64).lstrip()[:1]
    items: Iterator[tuple[int, Any]]
    if head_byte == b"[":
        items = iter(_read_list(path))
    elif head_byte not in (b"{", b"") and csv_columns(path):
        items = _read_rows(path)
    else:
        items = lines.read_lines(path)
    head = list(islice(items, _ORDER_SAMPLE_ENTRIES))
    if not _is_newest_first(_readable_times(head, time_of)):
        yield from chain(head, items)
        return
    tolerance.understood.remarks["The file is newest first and was read from its end."] = None
    is_lines = isinstance(head[0][1], bytes)
    yield from read_lines_backwards(path) if is_lines else reversed([*head, *items])


def _read_list(path: Path) -> list[tuple[int, Any]]:
    with lines.open_binary(path) as stream:
        raw = stream.read(_MAX_LIST_BYTES + 1)
    if len(raw) > _MAX_LIST_BYTES:
        raise CanopyError(f"{str(path)!r} is one JSON list of more than 1 GiB; make lines of it: jq -c '.[]'")  # fmt: skip
    try:
        return list(enumerate(json.loads(raw), 1))
    except (ValueError, RecursionError) as error:
        raise CanopyError(f"{str(path)!r} is not a JSON list ({error})") from None


def csv_columns(path: Path) -> list[str]:
    """Return the names in the header of a table; empty if the first line is not a header."""
    for _, text in islice(lines.read_lines(path), 1):
        try:
            names = next(csv.reader([text.decode("utf-8-sig", "replace")]), [])
        except csv.Error:
            return []
        if len(names) > 1 and all(re.fullmatch(r"[A-Za-z_][\w.-]{0,60}", name) for name in names):
            return names
    return []


def _read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield a table's rows as entries, without empty cells; numbers outside text columns as ``int``."""
    csv.field_size_limit(_MAX_CELL_BYTES)
    with lines.open_binary(path) as stream:
        text = io.TextIOWrapper(stream, "utf-8-sig", "replace", newline="")
        reader = csv.DictReader(text)
        for row in reader:
            items = ((k, v) for k, v in row.items() if isinstance(k, str))
            cells = {k: v for k, v in items if isinstance(v, str) and v}
            entry = {k: v if k in _TEXT_COLUMNS else _parse_cell(v) for k, v in cells.items()}
            yield reader.line_num, entry


_TEXT_COLUMNS = ("messages", "prompt", "input", "contents", "output", "response")
"""Columns of text, which may consist of digits."""


def _parse_cell(text: str) -> int | str:
    """Return a whole number written as such; ``007`` is a name."""
    is_whole = text.isdecimal() and len(text) < 19 and (text == "0" or text[0] != "0")
    return int(text) if is_whole else text


def _readable_times(items: Iterable[tuple[int, Any]], time_of: TimeOf) -> Iterator[float]:
    for _, item in items:
        try:
            yield time_of(_to_entry(item))
        except lines.BadLine:
            continue


def _is_newest_first(times: Iterable[float]) -> bool:
    """Return whether nearly all times fall; answers that end out of order may rise."""
    rises = falls = 0
    previous: float | None = None
    for time_s in times:
        if previous is not None:
            rises, falls = rises + (time_s > previous), falls + (time_s < previous)
        previous = time_s
    return falls > 3 and falls > 4 * rises


def _to_entry(item: Any) -> dict[str, Any]:
    if isinstance(item, bytes):
        return lines.parse_object(item)
    if not isinstance(item, dict):
        raise lines.BadLine(f"must be a JSON object, got {type(item).__name__}")
    return item
