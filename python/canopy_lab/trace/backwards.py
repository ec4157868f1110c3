"""Read a file's lines from the last to the first, for logs that are newest first."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

from canopy_lab.trace.lines import COMPRESSED, open_binary
from sglang_canopy.errors import CanopyError

_STEP = 1 << 20


def read_lines_backwards(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield ``(1-based line number, line)`` of all non-blank lines, in reverse order.

    Memory: one line and ``_STEP`` bytes. Raises ``CanopyError`` for a compressed file.
    """
    if path.suffix in COMPRESSED:
        raise CanopyError(
            f"{str(path)!r} is newest first and compressed, so it cannot be read in order of time; "
            "decompress it, or sort it by time"
        )
    with open_binary(path) as stream:
        begin = stream.tell()
        number = 1 + sum(chunk.count(b"\n") for chunk in iter(lambda: stream.read(_STEP), b""))
        at, rest = stream.seek(0, io.SEEK_END), b""
        while at > begin:
            size = min(at - begin, _STEP)
            at -= size
            stream.seek(at)
            pieces = (stream.read(size) + rest).split(b"\n")
            # Unless it is the file's first line, the first piece lacks its beginning.
            rest = pieces.pop(0) if at > begin else b""
            for piece in reversed(pieces):
                if piece.strip():
                    yield number, piece + b"\n"
                number -= 1
