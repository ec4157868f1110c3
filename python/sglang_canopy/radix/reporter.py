"""The thread that shows what a scheduler process counts, once a second.

The scheduler's own thread only adds integers. This one reads them, writes the status file and,
with ``--enable-metrics``, SGLang's metrics; it works in slices of about a millisecond.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from sglang_canopy.radix import status_file
from sglang_canopy.radix.metrics import Metrics
from sglang_canopy.radix.status import Status

if TYPE_CHECKING:
    from sglang_canopy.radix.cache import CanopyRadixCache

logger = logging.getLogger(__name__)

EVERY_S = 1.0
_SLICE_PAUSE_S = 0.002


class Reporter:
    """Reports on one cache until the process ends (or ``stop``)."""

    def __init__(self, cache: CanopyRadixCache, rank: int, metrics: Metrics | None) -> None:
        self.status = Status(cache, rank)
        self.metrics = metrics
        self.spent_s = 0.0
        """CPU seconds of this thread."""
        self._failed = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="canopy-report", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def report(self) -> dict[str, Any]:
        """One report, now. Returns the status."""
        status = self.status.take(time.monotonic(), lambda: time.sleep(_SLICE_PAUSE_S))
        status["reporting_s"] = self.spent_s
        status_file.write(self.status.rank, status)
        if self.metrics is not None:
            self.metrics.show(self.status.counters, status)
        return status

    def _run(self) -> None:
        while not self._stopped.wait(EVERY_S):
            try:
                self.report()
            except Exception:  # nothing here is worth a server
                if not self._failed:
                    self._failed = True
                    logger.warning("canopy: cannot report (said once)", exc_info=True)
            self.spent_s = time.thread_time()


def start(cache: CanopyRadixCache, enable_metrics: bool) -> Reporter | None:
    """Report on this process's cache, if its rank is the one that does.

    Tensor- and pipeline-parallel ranks hold trees with the same nodes and would count the same
    again: the first of them speaks for all. Data-parallel replicas speak for themselves.
    """
    from sglang.srt.runtime_context import get_observability, get_parallel

    parallel = get_parallel()
    if parallel.attn_tp_rank or parallel.attn_cp_rank or parallel.pp_rank:
        return None
    rank = parallel.dp_rank if parallel.dp_rank is not None else parallel.attn_dp_rank
    metrics = None
    if enable_metrics:
        metrics = Metrics(rank, get_observability().extra_metric_labels)
    reporter = Reporter(cache, rank, metrics)
    reporter.start()
    return reporter
