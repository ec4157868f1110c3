"""Thread for the disk tier's periodic work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Sweeper:
    """Call ``maintain`` every ``interval_s`` seconds and ``sweep`` every ``sweep_s``."""

    def __init__(
        self,
        maintain: Callable[[], None],
        sweep: Callable[[], None],
        interval_s: float,
        sweep_s: float,
    ) -> None:
        self.maintain, self.sweep = maintain, sweep
        self.interval_s, self.sweep_s = interval_s, sweep_s
        self.cpu_s = 0.0
        """CPU time used so far, in seconds."""
        self._stop = threading.Event()
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; possible again after ``stop``."""
        self._stop.clear()
        self.thread = threading.Thread(target=self._run, name="canopy-sweeper", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end, at most 10 s."""
        self._stop.set()
        if self.thread is not None:
            self.thread.join(timeout=10)

    def _run(self) -> None:
        passed = 0.0
        while not self._stop.wait(self.interval_s):
            begin = time.thread_time()
            self.maintain()
            passed += self.interval_s
            if passed >= self.sweep_s:
                passed = 0.0
                self.sweep()
            self.cpu_s += time.thread_time() - begin
