"""Traces that several questions read: real public traces, and synthetic stand-ins for the papers' traces.

Traces A and B of KVCache Cache in the Wild cannot be shipped; ``trace_a`` and ``trace_b`` are made to
their published statistics (docs/research/planner.md) and prove nothing about properties that
were calibrated.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from overlays import overlay
from synthetic.presets import get_preset
from synthetic.trace import synthesise

from canopy_lab.trace.open import open_trace
from canopy_lab.trace.record import TraceRequest

DAY_S = 86400.0
TRACE_FILES = {"conversation": "conversation_first60.jsonl", "synthetic": "synthetic_trace.jsonl"}


def mooncake(
    data_folder: Path, name: str, count: int | None = None, skip: int = 0
) -> list[TraceRequest]:
    """Mooncake's ``conversation`` (real) or ``synthetic``: no types, no users, conversations inferred
    from blocks; ``count`` requests (all by default) after the first ``skip``."""
    requests = open_trace(data_folder / "mooncake" / TRACE_FILES[name], "mooncake")
    return list(islice(requests, skip, None if count is None else skip + count))


def agents(
    data_folder: Path, conversations: int, window_s: float = 7200.0, seed: int = 1
) -> list[TraceRequest]:
    """Real agents' conversations, overlaid: started within ``window_s``."""
    archive = data_folder / "agentic_coding" / "traces_500.tar.xz"
    return list(overlay(archive, conversations, window_s, seed))


def trace_a(seconds: float = DAY_S, rate: float | None = 0.5, seed: int = 1) -> list[TraceRequest]:
    """The synthetic trace A: a day at half a request a second; ``None``: at the preset's rate."""
    preset = get_preset("trace-a").at_rate(rate)
    return [drawn.request for drawn in synthesise(preset, seconds, seed)]


def trace_b(seconds: float = 1200.0, seed: int = 1) -> list[TraceRequest]:
    """The synthetic trace B, at the public sample's 24 requests a second."""
    return [drawn.request for drawn in synthesise(get_preset("trace-b"), seconds, seed)]
