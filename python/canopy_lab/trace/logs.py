"""Any log as trace records, one way: text through a cutter, the rest through its reader."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from canopy_lab.trace import lines
from canopy_lab.trace.open import format_names, open_trace
from canopy_lab.trace.prompts import Cutter, LoggedPrompt
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError

TEXT_FORMATS = {"openai": "openai_log", "vllm": "vllm_log"}
"""Formats that hold prompts, and the module of each."""


def check_log(path: Path | str, format: str, tokenizer: str | None) -> Path:
    """``path``, if it and the options fit. Raises ``CanopyError``."""
    if format not in format_names():
        raise CanopyError(f"unknown format {format!r}; choose one of: {', '.join(format_names())}")
    if tokenizer is not None and format not in TEXT_FORMATS:
        raise CanopyError(
            f"--tokenizer is for logs of text ({', '.join(TEXT_FORMATS)}); a log of format "
            f"{format!r} has blocks already"
        )
    return lines.existing(path)


def open_prompts(path: Path, format: str, tolerance: lines.Tolerance) -> Iterator[LoggedPrompt]:
    """The prompts of a log of text, in the order of the file."""
    module = importlib.import_module(f"canopy_lab.trace.{TEXT_FORMATS[format]}")
    prompts: Iterator[LoggedPrompt] = module.prompts(path, tolerance)
    return prompts


def open_log(
    path: Path | str, format: str, *, cutter: Cutter | None = None, skip_bad: int = 0
) -> Iterator[TraceRequest]:
    """``open_trace``, with a cutter for logs of text."""
    if format not in TEXT_FORMATS or cutter is None:
        yield from open_trace(path, format, skip_bad=skip_bad)
        return
    path = lines.existing(path)
    tolerance = lines.Tolerance(path, skip_bad)
    module = importlib.import_module(f"canopy_lab.trace.{TEXT_FORMATS[format]}")
    yield from module.read(path, tolerance, cutter)
    tolerance.report()
