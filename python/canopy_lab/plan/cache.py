"""On-disk cache of simulation results: an append-only file with one line of JSON per result.

The key of a line is the hash of all inputs of the simulation: the trace's content, the profile, the
configuration with its bandwidths in the price list, the load, the seed and the code. Costs are
computed from the row afterwards: a changed price needs no new simulation, a changed bandwidth does.
A killed plan loses only its running simulations.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError
from sglang_canopy.private_file import cache_folder

_CODE = (
    *(f"sglang_canopy/{room}" for room in ("admission", "policy", "reuse", "schedule", "ttl")),
    *(f"canopy_lab/{room}" for room in ("sim", "trace")),
)
_OWN_CODE = ("evaluate.py", "groups.py", "system.py", "worker.py")


def default_folder() -> Path:
    return cache_folder("plan")


class Cache:
    """Rows by key, in one file per trace and profile. ``folder=None`` writes no file."""

    def __init__(self, folder: Path | str | None, context: str) -> None:
        self._rows: dict[str, dict[str, Any]] = {}
        self._path: Path | None = None
        if folder is None:
            return
        folder = Path(folder)
        self._path = folder / f"{context[:24]}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = os.open(
                self._path,
                os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0),
                0o600,
            )
            text = self._path.read_bytes()
        except OSError as error:
            raise CanopyError(
                f"cannot keep simulations in {str(folder)!r}: {error}; give --cache FOLDER, or "
                "--cache off"
            ) from None
        if text and not text.endswith(b"\n"):
            os.write(self._file, b"\n")  # a killed writer left a partial line
        for line in text.splitlines():
            self._take(line)

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the row of ``key``, or ``None``."""
        return self._rows.get(key)

    def put(self, key: str, row: Mapping[str, Any]) -> None:
        """Store a row. It is on disk when this returns."""
        self._rows[key] = dict(row)
        if self._path is not None:
            line = json.dumps({"key": key, "row": row}, allow_nan=False) + "\n"
            os.write(self._file, line.encode())

    def close(self) -> None:
        if self._path is not None:
            os.close(self._file)
            self._path = None

    def _take(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
        except ValueError:
            return
        if not isinstance(entry, dict) or not isinstance(entry.get("row"), dict):
            return
        if isinstance(entry.get("key"), str):
            self._rows[entry["key"]] = entry["row"]


def digest(value: Any) -> str:
    """Return the hash of a JSON-able value. Equal values have equal hashes."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def trace_digest(trace: Iterable[TraceRequest]) -> str:
    """Return the hash of a trace's content, independent of its path and compression."""
    sha = hashlib.sha256()
    for r in trace:
        head = (
            r.time_s, r.input_tokens, r.output_tokens, r.block_tokens, r.category, r.turn,
            r.conversation, r.stop, r.user,
        )  # fmt: skip
        sha.update(repr(head).encode())
        try:
            sha.update(array("q", r.blocks).tobytes())
        except OverflowError:
            sha.update(repr(r.blocks).encode())
    return sha.hexdigest()


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Return the hash of the sources that determine a simulation's result."""
    sources = Path(__file__).parents[2]
    files = [path for room in _CODE for path in sorted((sources / room).rglob("*.py"))]
    files += [Path(__file__).parent / name for name in _OWN_CODE]
    sha = hashlib.sha256()
    for path in files:
        sha.update(str(path.relative_to(sources)).encode() + b"\0" + path.read_bytes() + b"\0")
    return sha.hexdigest()
