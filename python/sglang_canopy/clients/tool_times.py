"""How long an agent's tools take, from the pauses after the answers that called them."""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Iterable

PAUSES = 8
"""Pauses of one tool that count: the newest."""
MAX_TOOLS = 256


class ToolTimes:
    """Pauses by tool: the median of the last ones. Shared by the sessions of a process."""

    def __init__(self) -> None:
        self._pauses: dict[str, deque[float]] = {}
        self._lock = threading.Lock()

    def took(self, tools: Iterable[str], seconds: float) -> None:
        """An answer called ``tools``, and the next request came after ``seconds``."""
        with self._lock:
            for tool in set(tools):
                pauses = self._pauses.pop(tool, None) or deque(maxlen=PAUSES)
                pauses.append(seconds)
                self._pauses[tool] = pauses  # last used, last out
            while len(self._pauses) > MAX_TOOLS:
                del self._pauses[next(iter(self._pauses))]

    def expected_s(self, tools: Iterable[str]) -> float | None:
        """The pause after an answer that calls ``tools``: that of the slowest. ``None`` where one of
        them has not been seen."""
        with self._lock:
            recorded = [self._pauses.get(tool) for tool in set(tools)]
            if not recorded or None in recorded:
                return None
            return max(statistics.median(pauses) for pauses in recorded if pauses)


TOOL_TIMES = ToolTimes()
"""Of this process."""
