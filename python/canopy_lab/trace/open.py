"""Open a trace of any format, or its last hours."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from canopy_lab.trace.lines import Tolerance, readable_path
from canopy_lab.trace.prompts import Cutter, LoggedPrompt, make_decoder, to_trace
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError

_BLOCK_MODULES = {
    "bailian": "bailian",
    "mooncake": "mooncake",
    "agentic": "agentic",
    "sglang": "sglang_log",
}
_TEXT_MODULES = {"openai": "openai_log", "vllm": "vllm_log", "otel": "otel_log"}
"""Formats with prompts as text: their modules have ``prompts``, the others ``read``."""
TEXT_FORMATS = tuple(_TEXT_MODULES)
_PROMPT_MODULES = {**_TEXT_MODULES, "sglang": "sglang_text"}
"""Formats whose prompts can be compared as text: these modules have ``prompts``."""
MAX_HOURS = 24 * 7


def format_names() -> tuple[str, ...]:
    """Return the formats that ``open_trace`` reads, as named in ``--format``."""
    return (*_BLOCK_MODULES, *_TEXT_MODULES)


def open_trace(path: Path | str, format: str, *, skip_bad: int = 0) -> Iterator[TraceRequest]:
    """Read a trace, one request at a time, in order of time.

    ``path`` may be compressed (``.gz``, ``.xz``, ``.zst``). Its existence is checked at once, its
    lines during the iteration. Up to ``skip_bad`` broken lines are ignored; the next one raises
    ``CanopyError`` with the file, the line's number and the reason. Counts of ignored and changed
    entries are logged at the end.
    """
    _check_format(format)
    path = readable_path(path)
    return read_trace(path, format, Tolerance(path, skip_bad))


def check_log(path: Path | str, format: str, tokenizer: str | None) -> Path:
    """Return ``path`` if it and the options fit. Raises ``CanopyError``."""
    _check_format(format)
    if tokenizer is not None and format not in _PROMPT_MODULES:
        raise CanopyError(
            f"--tokenizer is for logs of text ({', '.join(_TEXT_MODULES)}) and of sglang; a log of format "
            f"{format!r} has blocks already"
        )
    return readable_path(path)


def open_prompts(path: Path, format: str, tolerance: Tolerance) -> Iterator[LoggedPrompt]:
    """Yield the prompts of a text log, in the order of the file."""
    module = importlib.import_module(f"canopy_lab.trace.{_PROMPT_MODULES[format]}")
    prompts: Iterator[LoggedPrompt] = module.prompts(path, tolerance)
    return prompts


def open_texts(
    path: Path, format: str, tolerance: Tolerance, tokenizer: str | None = None
) -> Iterator[LoggedPrompt] | None:
    """Return the prompts of a log with prompts, in the order of the file; ``None`` for other
    formats.

    Prompts of token ids are decoded by ``tokenizer``, if it is given.
    """
    if format not in _PROMPT_MODULES:
        return None
    return _decode_prompts(open_prompts(path, format, tolerance), make_decoder(tokenizer))


def _decode_prompts(
    prompts: Iterator[LoggedPrompt], decode: Callable[[list[int]], str] | None
) -> Iterator[LoggedPrompt]:
    for prompt in prompts:
        if prompt.token_ids is not None and decode is not None:
            prompt.text, prompt.token_ids = decode(prompt.token_ids), None
        yield prompt


def _check_format(format: str) -> None:
    if format not in format_names():
        raise CanopyError(
            f"unknown trace format {format!r}; choose one of: {', '.join(format_names())}"
        )


def read_trace(path: Path, format: str, tolerance: Tolerance) -> Iterator[TraceRequest]:
    """Yield the requests in order of time, and count them in ``tolerance``."""
    if format in _TEXT_MODULES:
        requests = to_trace(open_prompts(path, format, tolerance), tolerance, Cutter())
    else:
        reader = importlib.import_module(f"canopy_lab.trace.{_BLOCK_MODULES[format]}").read
        requests = reader(path, tolerance)
    for request in requests:
        tolerance.understood.requests += 1
        yield request
    tolerance.report()


def last_hours(trace: Iterable[TraceRequest], hours: float) -> list[TraceRequest]:
    """Return the requests of the trace's last ``hours``, with times relative to the first of them.

    The end is the trace's last request instead of the current time, so that a plan depends on the
    log alone. Raises ``CanopyError`` without requests. Memory: the requests of those hours.
    """
    if not 0 < hours <= MAX_HOURS:
        raise CanopyError(f"--last-hours must be above 0 and at most {MAX_HOURS}, got {hours}")
    recent: list[TraceRequest] = []
    for request in trace:
        recent.append(request)
        if len(recent) % 4096 == 0:
            recent = [r for r in recent if r.time_s >= request.time_s - hours * 3600]
    if not recent:
        raise CanopyError("the log holds no finished request yet; wait, or give another one")
    recent = [r for r in recent if r.time_s >= recent[-1].time_s - hours * 3600]
    return [replace(r, time_s=r.time_s - recent[0].time_s) for r in recent]
