"""TTLs of the disk tier learnt while the server runs: the last minutes decide the next ones.

The scheduler's thread notes each finished request and, once a window, takes a snapshot; another
thread makes the table of it. The table comes into force at a time of the requests' own clock
that was fixed when the work began, so that every rank changes at the same request.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sglang_canopy.records import Request
from sglang_canopy.ttl.table import TTLTable
from sglang_canopy.ttl.window import TrafficWindow, WindowSnapshot

logger = logging.getLogger(__name__)

DELAY_S = 60.0
"""From the snapshot to the change, in seconds of the requests' clock, or half a window if that
is less. The allocator is done long before; a rank that is not is waited for."""


class TtlWindow:
    """Re-allocates the disk's TTLs every ``window_s`` seconds."""

    def __init__(self, window_s: float, block_tokens: int) -> None:
        self.window_s = window_s
        self.window = TrafficWindow(window_s=window_s, block_tokens=block_tokens)
        self.delay_s = min(window_s / 2, DELAY_S)
        self.changes = 0
        self._next = float("inf")
        self._due = float("inf")
        self._work: threading.Thread | None = None
        self._table: TTLTable | None = None

    def request_finished(self, request: Request) -> None:
        """Note a request whose path is complete."""
        tokens = request.prompt_tokens + request.output_tokens
        # The label that its pages carry: how the response stopped and which turn it was say most.
        label = request.label or request.category
        self.window.observe(request.path, request.time, tokens, label)

    def request_arrived(
        self, now: float, capacity: Callable[[], tuple[int, float] | None]
    ) -> TTLTable | None:
        """The table that comes into force with the request that arrived at ``now``, if one does.

        ``capacity`` gives the disk tier's bytes and those of a token; it is asked once a window.
        """
        table = self._due_table() if now >= self._due else None
        self._begin_if_time(now, capacity)
        return table

    def _begin_if_time(self, now: float, capacity: Callable[[], tuple[int, float] | None]) -> None:
        if self._next == float("inf"):
            self._next = now + self.window_s
        elif now >= self._next and self._work is None:
            self._next, self._due = now + self.window_s, now + self.delay_s
            budget = capacity()
            if budget is None:
                return
            work = threading.Thread(
                target=self._allocate,
                args=(self.window.snapshot(), *budget),
                name="canopy-ttl",
                daemon=True,
            )
            self._work = work
            work.start()

    def _allocate(self, seen: WindowSnapshot, budget_bytes: float, token_bytes: float) -> None:
        try:
            self._table = seen.table(budget_bytes, token_bytes)
        except Exception:
            logger.exception("the TTLs stay as they are: allocating new ones failed")

    def _due_table(self) -> TTLTable | None:
        self._due = float("inf")
        work, self._work = self._work, None
        if work is None:
            return None
        work.join()
        table, self._table = self._table, None
        if table is not None:
            self.changes += 1
        return table
