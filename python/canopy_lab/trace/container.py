"""Remove the wrapping that a container runtime adds to each line of a process.

Two forms, recognised by a file's first line:

- Docker's json-file: ``{"log":"text\\n","stream":"stdout","time":"2026-01-02T..."}``. A line longer
  than 16 KiB is several entries, and only the last ends in a line feed.
- CRI (containerd, CRI-O): ``2026-01-02T10:00:00.1Z stdout P text``. ``P`` marks a part that another
  entry of the same stream continues, ``F`` the last part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

_CRI = re.compile(rb"\d{4}-\d\d-\d\dT\S+ (stdout|stderr) ([PF])(?:[:\w]*) ?(.*)", re.S)
_LONGEST_LINE = 64 << 20
"""Maximum bytes of a line. A part that is still open at this length is passed on unchanged."""
BROKEN = b'{"log":'
"""Stands for an entry of Docker's that is no JSON: its text is escaped, so it is not passed on."""

Entry = tuple[str, bytes, bool]
"""Stream, text, and whether the text ends its line."""


def unwrapped(lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Yield ``(number, line)`` as the process wrote them; other files pass through unchanged.

    ``number`` is that of the last physical line. Memory: one line of each stream.
    """
    first = next(lines, None)
    if first is None:
        return
    parse = _wrapper_of(first[1])
    if parse is None:
        yield first
        yield from lines
        return
    parts: dict[str, tuple[int, list[bytes]]] = {}
    number = 0
    for number, text in _chain(first, lines):
        entry = parse(text)
        if entry is None:
            if text.startswith(BROKEN):
                text = BROKEN + (b"\n" if text.endswith(b"\n") else b"")
            yield number, text
            continue
        stream, piece, ends = entry
        size, pieces = parts.pop(stream, (0, []))
        pieces.append(piece)
        if ends or size + len(piece) > _LONGEST_LINE:
            line = b"".join(pieces)
            if line.strip():
                yield number, line if line.endswith(b"\n") else line + b"\n"
        else:
            parts[stream] = (size + len(piece), pieces)
    for _, pieces in parts.values():
        # The file ends inside a line, which readers detect by its missing line feed.
        yield number, b"".join(pieces)


def _chain(
    first: tuple[int, bytes], rest: Iterator[tuple[int, bytes]]
) -> Iterator[tuple[int, bytes]]:
    yield first
    yield from rest


def _wrapper_of(line: bytes) -> Callable[[bytes], Entry | None] | None:
    for parse in (_docker, _cri):
        if parse(line) is not None:
            return parse
    return None


def _docker(line: bytes) -> Entry | None:
    if not line.startswith(BROKEN):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    text = entry.get("log")
    if not isinstance(text, str) or "stream" not in entry:
        return None
    return str(entry["stream"]), text.encode("utf-8", "surrogatepass"), text.endswith("\n")


def _cri(line: bytes) -> Entry | None:
    found = _CRI.match(line)
    if found is None:
        return None
    ends = found[2] == b"F"
    return found[1].decode(), found[3] if ends else found[3].rstrip(b"\r\n"), ends
