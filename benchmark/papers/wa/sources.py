"""Stand-ins for the paper's two traces, and three real traces.

Traces A and B cannot be shipped; `trace-a` and `trace-b` of `benchmark/traces` are made to their published
statistics (docs/research/synthetic-traces.md) and prove nothing about properties that were calibrated.
"""

from __future__ import annotations

from pathlib import Path

from overlays import overlay
from synthetic.presets import get_preset
from synthetic.trace import synthesise

from canopy_lab.trace.open import open_trace
from canopy_lab.trace.record import TraceRequest

DAY_S = 86400.0


def trace_a(seconds: float = DAY_S, rate: float = 0.5, seed: int = 1) -> list[TraceRequest]:
    """The synthetic trace A: a day at half a request a second."""
    preset = get_preset("trace-a").at_rate(rate)
    return [d.request for d in synthesise(preset, seconds, seed)]


def trace_b(seconds: float = 1200.0, seed: int = 1) -> list[TraceRequest]:
    """The synthetic trace B, at the public sample's 24 requests a second."""
    return [d.request for d in synthesise(get_preset("trace-b"), seconds, seed)]


def conversation(data: Path) -> list[TraceRequest]:
    """Mooncake's conversations: real, no types, no users, conversations inferred from blocks."""
    return list(open_trace(data / "mooncake" / "conversation_first60.jsonl", "mooncake"))


def mooncake_synthetic(data: Path) -> list[TraceRequest]:
    """Mooncake's synthetic trace."""
    return list(open_trace(data / "mooncake" / "synthetic_trace.jsonl", "mooncake"))


def agentic(data: Path, conversations: int = 60) -> list[TraceRequest]:
    """Real agents' conversations, overlaid: started within two hours."""
    archive = data / "agentic_coding" / "traces_500.tar.xz"
    return list(overlay(archive, conversations, 7200.0, 1))
