"""The Azure LLM inference traces: csv with an arrival time and two lengths.

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:17:03.9799600,4808,10

The order of the columns does not matter, and other columns, such as ``NumImages``, are ignored. The
traces have no content, so every request has its own blocks and nothing is reused. They provide
arrival times and lengths, and a case in which no policy can gain.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from pathlib import Path

from canopy_lab.trace import lines
from canopy_lab.trace.record import TraceRequest

BLOCK_TOKENS = 64
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def columns(header: bytes) -> tuple[int, ...] | None:
    """Return the positions of ``COLUMNS`` in a header; ``None`` if a column is missing."""
    names = header.decode("utf-8-sig", "replace").strip().split(",")
    return tuple(map(names.index, COLUMNS)) if set(COLUMNS) <= set(names) else None


def read(path: Path, tolerance: lines.Tolerance) -> Iterator[TraceRequest]:
    """Yield the requests of ``path``, in constant memory."""
    clock = lines.Clock()
    start: datetime.datetime | None = None
    next_block = 0
    at: tuple[int, ...] = (0, 1, 2)
    width = 3

    def parse(line: int, raw: bytes) -> TraceRequest | None:
        nonlocal start, next_block, at, width
        cells = raw.decode("utf-8-sig", "replace").strip().split(",")
        if line == 1:
            found = columns(raw)
            if found is None:
                raise lines.BadLine(f"the header must have {','.join(COLUMNS)}, got {raw[:60]!r}")
            at, width = found, len(cells)
            return None
        if len(cells) != width:
            raise lines.BadLine(f"must have {width} cells, as the header has, got {len(cells)}")
        cells = [cells[i] for i in at]
        when = _instant(cells[0])
        tokens, output = (_tokens(c, n) for c, n in zip(cells[1:], COLUMNS[1:], strict=True))
        start = start or when
        time_s = clock.check((when - start).total_seconds())
        blocks = range(next_block, next_block + -(-tokens // BLOCK_TOKENS))
        next_block = blocks.stop
        return TraceRequest(
            time_s, tokens, output, tuple(blocks), BLOCK_TOKENS, conversation=str(line), line=line
        )

    return lines.each(path, tolerance, parse)


def _instant(text: str) -> datetime.datetime:
    # The timestamp has seven digits after the second, one more than datetime accepts.
    short = re.sub(r"(\.\d{6})\d+", r"\1", text)
    try:
        when = datetime.datetime.fromisoformat(short)
    except ValueError:
        raise lines.BadLine(f"TIMESTAMP must be a date and time, got {text!r}") from None
    return when if when.tzinfo else when.replace(tzinfo=datetime.timezone.utc)


_MAX_DIGITS = 8
"""Maximum digits of a count: each block of a prompt is in memory."""


def _tokens(text: str, name: str) -> int:
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise lines.BadLine(f"{name} must be a whole number of tokens, got {text!r:.40}")
    return int(text)
