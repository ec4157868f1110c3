"""A cache of simulation results on disk: one line of JSON each, only ever appended to.

A line's key is the hash of everything the simulation reads: the trace's content, the profile, the
configuration with the bandwidths that the price list gives it, the load, the seed, and the code.
What a configuration costs is worked out from the row afterwards, so that a changed price alone
simulates nothing anew, while one that changes a bandwidth does. A plan that is killed loses the
simulations under way.
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
    """Where simulations are kept unless ``--cache`` says."""
    return cache_folder("plan")


class Cache:
    """Rows by key, in one file for one trace and profile. ``folder=None`` keeps nothing."""

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
                "--no-cache"
            ) from None
        if text and not text.endswith(b"\n"):
            os.write(self._file, b"\n")  # killed in the middle of a line
        for line in text.splitlines():
            self._take(line)

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: str) -> dict[str, Any] | None:
        """The row kept under ``key``."""
        return self._rows.get(key)

    def put(self, key: str, row: Mapping[str, Any]) -> None:
        """Keep a row; on disk when this returns."""
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
    """Hash of a JSON-able value; equal values, equal hashes."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def trace_digest(trace: Iterable[TraceRequest]) -> str:
    """Hash of what a trace says, wherever it lies and however it is compressed."""
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
    """Hash of the sources that decide what a simulation gives."""
    sources = Path(__file__).parents[2]
    files = [path for room in _CODE for path in sorted((sources / room).rglob("*.py"))]
    files += [Path(__file__).parent / name for name in _OWN_CODE]
    sha = hashlib.sha256()
    for path in files:
        sha.update(str(path.relative_to(sources)).encode() + b"\0" + path.read_bytes() + b"\0")
    return sha.hexdigest()
