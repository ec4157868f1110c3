"""Open a trace of any format."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from canopy_lab.trace.lines import Tolerance, existing
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError

_MODULES = {
    "bailian": "bailian",
    "mooncake": "mooncake",
    "agentic": "agentic",
    "azure": "azure",
    "sglang": "sglang_log",
    "openai": "openai_log",
    "vllm": "vllm_log",
}


def format_names() -> tuple[str, ...]:
    """The formats ``open_trace`` knows, as ``--format`` takes them."""
    return tuple(_MODULES)


def open_trace(path: Path | str, format: str, *, skip_bad: int = 0) -> Iterator[TraceRequest]:
    """Read a trace, one request at a time, in order of time.

    ``path`` may be compressed (``.gz``, ``.xz``, ``.zst``). The file is checked for existence
    at once; everything else happens while iterating. A line that cannot be used raises
    ``CanopyError`` with the file, the line's number and what is wrong; ``skip_bad`` lets that
    many pass, and says on the log at the end how many there were.
    """
    if format not in _MODULES:
        raise CanopyError(
            f"unknown trace format {format!r}; choose one of: {', '.join(format_names())}"
        )
    path = existing(path)
    return _read(path, format, Tolerance(path, skip_bad))


def _read(path: Path, format: str, tolerance: Tolerance) -> Iterator[TraceRequest]:
    reader = importlib.import_module(f"canopy_lab.trace.{_MODULES[format]}").read
    yield from reader(path, tolerance)
    tolerance.report()
