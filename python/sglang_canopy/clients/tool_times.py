"""Durations of an agent's tools, from the pauses after the answers that called them."""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Iterable

PAUSES = 8
"""Number of recent pauses that count, per tool."""
MAX_TOOLS = 256


class ToolTimes:
    """Recent pauses by tool, for their median. Shared by the sessions of a process."""

    def __init__(self) -> None:
        self._pauses: dict[str, deque[float]] = {}
        self._lock = threading.Lock()

    def took(self, tools: Iterable[str], seconds: float) -> None:
        """Record ``seconds`` between an answer that called ``tools`` and the next request."""
        with self._lock:
            for tool in set(tools):
                pauses = self._pauses.pop(tool, None) or deque(maxlen=PAUSES)
                pauses.append(seconds)
                self._pauses[tool] = pauses  # most recently used last
            while len(self._pauses) > MAX_TOOLS:
                del self._pauses[next(iter(self._pauses))]

    def expected_s(self, tools: Iterable[str]) -> float | None:
        """Return the expected pause after an answer that calls ``tools``: the slowest tool's
        median. ``None`` if a tool has no recorded pause."""
        with self._lock:
            recorded = [self._pauses.get(tool) for tool in set(tools)]
            if not recorded or None in recorded:
                return None
            return max(statistics.median(pauses) for pauses in recorded if pauses)


TOOL_TIMES = ToolTimes()
"""Tool times of this process."""
