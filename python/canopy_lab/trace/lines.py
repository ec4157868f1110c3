"""Read a trace file line by line, with a clear message for a broken line.

Every reader uses it, so memory is bounded by one line (in an archive: by one conversation).
"""

from __future__ import annotations

import codecs
import contextlib
import datetime
import gzip
import io
import json
import logging
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, TypeVar

from canopy_lab.trace.container import unwrap
from canopy_lab.trace.understood import Understood
from sglang_canopy.errors import CanopyError

log = logging.getLogger("canopy_lab.trace")

COMPRESSED = (".gz", ".xz", ".zst")
MAX_NUMBER = sys.float_info.max
"""Largest number of a log; whole numbers may be larger than any float."""
COUNT_LIMIT = 1 << 63
"""Upper bound of counts and ids, so that they fit a signed integer of 64 bits."""
Parsed = TypeVar("Parsed")
_MAX_TIME_HEAD_BYTES = 400
_TIME_FIELD = re.compile(
    rb"(20\d\d-[01]\d-[0-3]\d[T ][0-2]\d:[0-5]\d:[0-5]\d)|"
    rb'"(?:time|timestamp|ts|created\w*|startTime\w*|request_received_ms|event_time_unix_ms)": ?"?(\d{10,19})'
)
"""A date, or a number of s, ms, us or ns since 1970."""


class BadLine(Exception):
    """An unusable line. The message is the reason, without the line's number."""


class CutOff(BadLine):
    """The last line of a file that is still being written."""


class Tolerance:
    """Limit on the broken lines of a file, and the reader's counts.

    The first broken line beyond ``skip_bad`` raises ``CanopyError`` with the file, the line number
    and the reason.
    """

    def __init__(self, path: Path | str, skip_bad: int = 0) -> None:
        if skip_bad < 0:
            raise CanopyError(f"skip_bad must be 0 or more broken lines, got {skip_bad}")
        self.path = path
        self.max_bad = skip_bad
        self.skipped = 0
        self.first_error = ""
        self.understood = Understood()

    def count_bad(self, line: int, reason: BadLine | str, name: str = "") -> None:
        """Count one broken line. Raises ``CanopyError`` beyond the limit; a cut last line only warns."""
        if isinstance(reason, CutOff):
            log.warning("%s, line %d: %s", self.path, line, reason)
            self.understood.left_out["cut off"] += 1
            return
        message = f"{self.path}{f' ({name})' if name else ''}, line {line}: {reason}"
        self.skipped += 1
        self.first_error = self.first_error or message
        if self.skipped <= self.max_bad:
            self.understood.left_out["broken"] += 1
            return
        if self.max_bad == 0:
            raise CanopyError(f"{message}; --skip-bad N skips up to N broken lines")
        raise CanopyError(f"{message}; that is one more than the {self.max_bad} --skip-bad allows")

    def report(self) -> None:
        """Log a notable share of ignored or changed entries, and the first broken line."""
        alarms = self.understood.alarms()
        if alarms:
            log.warning("%s: %s", self.path, " ".join(alarms))
        if self.skipped:
            log.warning(
                "%s: ignored %d broken lines, first: %s", self.path, self.skipped, self.first_error
            )


def readable_path(path: Path | str) -> Path:
    """Return ``path`` if it is a readable file or folder. Raises ``CanopyError``."""
    path = Path(path)
    if not path.exists():
        raise CanopyError(f"no trace at {str(path)!r}; give the path of an existing file")
    return path


@contextlib.contextmanager
def open_binary(path: Path) -> Iterator[IO[bytes]]:
    """Open a byte stream of ``path``, decompressed by its suffix (``.gz``, ``.xz``, ``.zst``).

    Raises ``CanopyError`` if the file cannot be read or its compressed data is damaged.
    """
    try:
        with contextlib.ExitStack() as stack:
            raw: Any
            if path.suffix == ".gz":
                raw = stack.enter_context(gzip.open(path, "rb"))
            elif path.suffix == ".xz":
                raw = stack.enter_context(lzma.open(path, "rb"))
            elif path.suffix == ".zst":
                raw = _open_zst(path, stack)
            else:
                raw = stack.enter_context(path.open("rb"))
            _skip_byte_order_mark(raw, path)
            yield raw
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise CanopyError(f"cannot read trace {str(path)!r}: {error}") from None


def _skip_byte_order_mark(raw: Any, path: Path) -> None:
    """Skip a byte order mark. Raises ``CanopyError`` for UTF-16."""
    head = raw.peek(3)[:3]
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise CanopyError(
            f"{str(path)!r} is UTF-16, and logs are read as UTF-8; convert it: "
            "iconv -f UTF-16 -t UTF-8"
        )
    if head == codecs.BOM_UTF8:
        raw.read(len(head))


def _open_zst(path: Path, stack: contextlib.ExitStack) -> Any:
    try:
        import zstandard
    except ImportError:
        raise CanopyError(
            f"{str(path)!r} is zstd-compressed: pip install zstandard, or recompress with gzip or xz"
        ) from None
    decompressor = zstandard.ZstdDecompressor()
    frames = _ZstdFrames(
        stack.enter_context(path.open("rb")), decompressor.decompressobj, zstandard.ZstdError
    )
    return io.BufferedReader(frames, buffer_size=1 << 18)


class _ZstdFrames(io.RawIOBase):
    """Reads all frames of a zstd file, and raises for a truncated file, as gzip and xz do.
    zstandard's own reader stops silently in both cases."""

    def __init__(self, raw: IO[bytes], frame: Callable[[], Any], error: type[Exception]) -> None:
        self._raw, self._new_frame, self._error = raw, frame, error
        self._frame: Any = None
        self._packed = self._decompressed = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._decompressed:
            if self._frame is not None and self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
            self._packed = self._packed or self._raw.read(1 << 16)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("compressed file ended before its last frame did")
                return 0
            self._frame = self._frame or self._new_frame()
            try:
                self._decompressed = self._frame.decompress(self._packed)
            except self._error as error:
                raise OSError(str(error)) from None
            self._packed = b""
        size = min(len(buffer), len(self._decompressed))
        buffer[:size], self._decompressed = self._decompressed[:size], self._decompressed[size:]
        return size


def files_of(folder: Path) -> list[Path]:
    """Return the logs in a folder, in order of their first times, else of their names."""
    logs = [p for p in folder.rglob("*") if p.is_file() and set(p.suffixes) & {".log", ".jsonl"}]
    return sorted(logs, key=lambda file: (_first_time_s(file), file.name))


def _first_time_s(file: Path) -> float:
    """Return the seconds since 1970 at the beginning of a file's first line; infinite without a time."""
    with open_binary(file) as stream:
        match = _TIME_FIELD.search(stream.readline(_MAX_TIME_HEAD_BYTES))
    if match is None:
        return float("inf")
    if match[2]:
        return float(match[2][:10])
    text = match[1].decode().replace(" ", "T")
    return datetime.datetime.fromisoformat(f"{text}+00:00").timestamp()


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield ``(1-based line number, line)`` of every line that is not blank.

    The wrapping of a container or a collector is removed (``container.py``). The files of a folder are
    one log, in order of their first times, and their lines are numbered on.
    """
    if path.is_dir():
        offset = last_number = 0
        for file in files_of(path):
            for number, line in read_lines(file):
                last_number = offset + number
                yield last_number, line
            offset = last_number
        return
    with open_binary(path) as stream:
        numbered = ((n, line) for n, line in enumerate(stream, 1) if line.strip())
        yield from ((n, line) for n, line in unwrap(numbered) if line.strip())


def parse_lines(
    path: Path, tolerance: Tolerance, parse: Callable[[int, bytes], Parsed | None]
) -> Iterator[Parsed]:
    """Yield the results of ``parse(number, line)`` for every line that is not blank.

    A result of ``None`` is ignored. A line for which ``parse`` raises ``BadLine`` is broken.
    """
    for number, text in read_lines(path):
        try:
            parsed = parse(number, text)
        except BadLine as error:
            tolerance.count_bad(number, error)
            continue
        if parsed is not None:
            yield parsed


def parse_object(text: bytes | str) -> dict[str, Any]:
    """Parse one JSON object. Raises ``BadLine``."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(text, bytes) and not text.endswith(b"\n"):
            raise CutOff("it is truncated and ignored; the file is still being written") from None
        raise BadLine(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise BadLine(f"must be a JSON object, got {type(value).__name__}")
    return value


def number(record: Mapping[str, Any], key: str) -> float:
    """Return a finite number of ``record``, 0 or more. Raises ``BadLine``."""
    value = record.get(key)
    if type(value) not in (int, float) or not 0 <= value <= MAX_NUMBER:  # type: ignore[operator]
        raise BadLine(f"{key!r} must be a number of 0 or more, got {_excerpt(record, key)}")
    return float(value)  # type: ignore[arg-type]


def count(record: Mapping[str, Any], key: str, minimum: int = 0) -> int:
    """Return a whole number of ``record``, ``minimum`` or more. Raises ``BadLine``."""
    value = record.get(key)
    if type(value) is not int or not minimum <= value < COUNT_LIMIT:
        raise BadLine(
            f"{key!r} must be a whole number of {minimum} or more, got {_excerpt(record, key)}"
        )
    return value


def block_ids(record: Mapping[str, Any], key: str = "hash_ids") -> tuple[int, ...]:
    """Return the block ids of ``record``. Raises ``BadLine``."""
    value = record.get(key)
    if type(value) is not list or not set(map(type, value)) <= {int}:
        raise BadLine(f"{key!r} must be a list of whole numbers, got {_excerpt(record, key)}")
    if value and not 0 <= min(value) <= max(value) < COUNT_LIMIT:
        return tuple(map(_hash_large_id, value))
    return tuple(value)


def _hash_large_id(block: int) -> int:
    """Return an id of 63 bits for a negative or larger number: a hash of its digits."""
    if 0 <= block < COUNT_LIMIT:
        return block
    return int.from_bytes(blake2b(b"%d" % block, digest_size=8).digest(), "little") >> 1


def _excerpt(record: Mapping[str, Any], key: str) -> str:
    if key not in record:
        return f"nothing (the line has: {', '.join(sorted(map(str, record)))[:200]})"
    text = json.dumps(record[key])
    return text if len(text) <= 60 else text[:57] + "..."


class TimeOrder:
    """Checks that times never decrease; a trace is read in one pass, so it must be sorted."""

    def __init__(self) -> None:
        self.last_s = 0.0

    def check(self, time_s: float) -> float:
        """Return ``time_s``. Raises ``BadLine`` if it is earlier than the previous time."""
        if time_s < self.last_s:
            raise BadLine(
                f"its time {time_s:g} s lies before the line above it ({self.last_s:g} s); "
                "sort the trace by time"
            )
        self.last_s = time_s
        return time_s
