"""The first requests of the real traces: few enough that every policy simulates them in a second."""

from __future__ import annotations

from functools import cache
from itertools import islice

from overlays import overlay
from paths import data_folder

from canopy_lab.trace.open import open_trace
from canopy_lab.trace.record import TraceRequest

TRACES = ("conversation", "synthetic", "agentic")
MAX_REQUESTS = 6000
AGENT_SESSIONS, SESSION_STARTS_S = 40, 3600.0
"""Sessions of ``agentic``, and the seconds within which they start."""


@cache
def first_requests(name: str, count: int = MAX_REQUESTS) -> list[TraceRequest]:
    """Return the first ``count`` requests of ``conversation``, ``synthetic`` or ``agentic``."""
    if name == "agentic":
        archive = data_folder() / "agentic_coding" / "traces_500.tar.xz"
        return list(islice(overlay(archive, AGENT_SESSIONS, SESSION_STARTS_S, 0), count))
    files = {"conversation": "conversation_first60.jsonl", "synthetic": "synthetic_trace.jsonl"}
    return list(islice(open_trace(data_folder() / "mooncake" / files[name], "mooncake"), count))
