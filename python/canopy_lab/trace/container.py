"""Remove the wrapping that a container runtime or a log collector adds to each line of a process.

A collector's wrapping (Google Cloud, Fluent Bit, Vector, CloudWatch, journald) is a JSON object of its
own around the line. Its names differ, so it is found by a rule: among the first ``_MAX_HEAD_LINES`` lines, a
field below which a server's line or a request's entry stands, as text or as an object.

A container runtime has two forms, recognised by a file's first line:

- Docker's json-file: ``{"log":"text\\n","stream":"stdout","time":"2026-01-02T..."}``. A line longer
  than 16 KiB is several entries, and only the last ends in a line feed.
- CRI (containerd, CRI-O): ``2026-01-02T10:00:00.1Z stdout P text``. ``P`` marks a part that another
  entry of the same stream continues, ``F`` the last part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

_CRI_LINE = re.compile(rb"\d{4}-\d\d-\d\dT\S+ (stdout|stderr) ([PF])(?:[:\w]*) ?(.*)", re.S)
_MAX_LINE_BYTES = 64 << 20
"""Maximum bytes of a line. A part that is still open at this length is passed on unchanged."""
BROKEN_DOCKER_LINE = b'{"log":'
"""Stands for an entry of Docker's that is no JSON: its text is escaped, so it is not passed on."""

_MAX_HEAD_LINES = 1000
"""Lines that are read to find a collector's field; a server's log begins with other lines."""
_MAX_NESTING = 3
"""Objects of a wrapping around each other."""
_SERVER_MARKS = (
    b'"event": "request.',
    b'"event":"request.',
    b"server_args=",
    b"Received request",
    b" details: prompt",
)
_ENTRY_KEYS = (
    *("event", "messages", "prompt", "prompt_token_ids", "input_ids", "contents", "input"),
    *("hash_ids", "body", "request", "request_body", "requestBody", "proxy_server_request"),
    *("kwargs", "attributes"),
    *("standard_logging_object", "resourceSpans", "requests", "schema"),
)
"""Fields of entries that are read as they are."""
_TIME_KEYS = ("time", "timestamp", "startTime", "start_time", "created_at", "event")

FieldPath = tuple[str, ...]
"""Fields from a collector's object to the line in it."""
StreamPiece = tuple[str, bytes, bool]
"""Stream, text, and whether the text ends its line."""


def unwrap(lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Yield ``(number, line)`` as the process wrote them; other files pass through unchanged.

    ``number`` is that of the last physical line. Memory: one line of each stream.
    """
    head_line = next(lines, None)
    if head_line is None:
        return
    parse = _parser_of(head_line[1])
    if parse is None:
        yield from _unwrap_collector(head_line, lines)
        return
    open_lines: dict[str, tuple[int, list[bytes]]] = {}
    number = 0
    for number, text in chain([head_line], lines):
        parsed = parse(text)
        if parsed is None:
            if text.startswith(BROKEN_DOCKER_LINE):
                text = BROKEN_DOCKER_LINE + (b"\n" if text.endswith(b"\n") else b"")
            yield number, text
            continue
        stream, piece, ends_line = parsed
        open_bytes, pieces = open_lines.pop(stream, (0, []))
        pieces.append(piece)
        if ends_line or open_bytes + len(piece) > _MAX_LINE_BYTES:
            line = b"".join(pieces)
            if line.strip():
                yield number, line if line.endswith(b"\n") else line + b"\n"
        else:
            open_lines[stream] = (open_bytes + len(piece), pieces)
    for _, pieces in open_lines.values():
        # The file ends inside a line, which readers detect by its missing line feed.
        yield number, b"".join(pieces)


def _unwrap_collector(
    head_line: tuple[int, bytes], lines: Iterator[tuple[int, bytes]]
) -> Iterator[tuple[int, bytes]]:
    """Yield the lines below a collector's fields, or all lines unchanged if there is none."""
    if not is_foreign(head_line[1]):
        yield head_line
        yield from lines
        return
    head = [head_line]
    paths = dict.fromkeys(_find_collector_field(head_line[1]))
    for line in islice(lines, 0 if paths else _MAX_HEAD_LINES):
        head.append(line)
        paths |= dict.fromkeys(_find_collector_field(line[1]))
        if paths:
            break
    for number, text in chain(head, lines):
        yield number, _inner_line(text, paths) if paths else text


def is_foreign(line: bytes) -> bool:
    """Return whether a line is a JSON object that is no entry of a known log."""
    entry = _parse_object(line)
    return entry is not None and not any(name in entry for name in _ENTRY_KEYS)


def _find_collector_field(line: bytes) -> list[FieldPath]:
    """Return the path to the field that holds a process's line, if there is one."""
    path = _find_field(_parse_object(line) or {}, 0) if is_foreign(line) else None
    return [] if path is None else [path]


def _find_field(entry: dict[str, Any], depth: int) -> FieldPath | None:
    for name, value in entry.items():
        if isinstance(value, str):
            text = value.encode("utf-8", "surrogatepass")
            inner = _parse_object(text)
            if any(mark in text for mark in _SERVER_MARKS) or (inner and _is_request(inner)):
                return (name,)
        elif isinstance(value, dict):
            if _is_request(value):
                return (name,)
            path = _find_field(value, depth + 1) if depth < _MAX_NESTING else None
            if path is not None:
                return (name, *path)
    return None


def _is_request(entry: dict[str, Any]) -> bool:
    return any(name in entry for name in _ENTRY_KEYS) and any(name in entry for name in _TIME_KEYS)


def _inner_line(line: bytes, paths: dict[FieldPath, None]) -> bytes:
    """Return the process's line in a collector's object; another line as it is.

    Adds to ``paths``: some collectors put text and objects into two fields.
    """
    entry = _parse_object(line)
    if entry is None:
        return line
    for path in (*paths, *([] if _value_at(entry, paths) else _find_collector_field(line))):
        value = _value_at(entry, {path: None})
        if value:
            paths[path] = None
            text = value if isinstance(value, str) else json.dumps(value)
            return text.encode("utf-8", "surrogatepass").rstrip(b"\n") + b"\n"
    return line


def _value_at(entry: dict[str, Any], paths: dict[FieldPath, None]) -> Any:
    """Return the value of the first of ``paths`` that leads to one."""
    for path in paths:
        value: Any = entry
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        if value:
            return value
    return None


def _parse_object(line: bytes) -> dict[str, Any] | None:
    if not line.lstrip().startswith(b"{"):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _parser_of(line: bytes) -> Callable[[bytes], StreamPiece | None] | None:
    for parse in (_parse_docker, _parse_cri):
        if parse(line) is not None:
            return parse
    return None


def _parse_docker(line: bytes) -> StreamPiece | None:
    if not line.startswith(BROKEN_DOCKER_LINE):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    text = entry.get("log")
    if not isinstance(text, str) or "stream" not in entry:
        return None
    return str(entry["stream"]), text.encode("utf-8", "surrogatepass"), text.endswith("\n")


def _parse_cri(line: bytes) -> StreamPiece | None:
    match = _CRI_LINE.match(line)
    if match is None:
        return None
    ends_line = match[2] == b"F"
    return match[1].decode(), match[3] if ends_line else match[3].rstrip(b"\r\n"), ends_line
