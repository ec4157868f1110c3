"""The thread that shows what a scheduler process counts, once a second.

The scheduler's own thread only adds integers. This one reads them, writes the status file and,
with ``--enable-metrics``, SGLang's metrics; it works in slices of about a millisecond.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from sglang_canopy.telemetry import status_file
from sglang_canopy.telemetry.metrics import Metrics
from sglang_canopy.telemetry.reported_cache import ReportedCache
from sglang_canopy.telemetry.status import Status, agreement

logger = logging.getLogger(__name__)

EVERY_S = 1.0
_SLICE_PAUSE_S = 0.002


class Reporter:
    """Reports on one cache until the process ends (or ``stop``).

    ``peer``: set on the tensor- and pipeline-parallel ranks whose trees have the same nodes as
    the first one's and would count the same again. They show only what must be equal on all.
    """

    def __init__(
        self, cache: ReportedCache, rank: int, metrics: Metrics | None, peer: str = ""
    ) -> None:
        self.status = Status(cache, rank)
        self.metrics = metrics
        self.peer = peer
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
        if self.peer:
            gate = self.status.cache.tree_core.live.gate
            status = agreement(self.status.counters, gate)
            status_file.write(self.status.rank, status, self.peer)
            return status
        status = self.status.take(time.monotonic(), lambda: time.sleep(_SLICE_PAUSE_S))
        status["reporting_s"] = self.spent_s
        status_file.write(self.status.rank, status)
        if self.metrics is not None:
            self.metrics.update(self.status.counters, status)
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


def start(cache: ReportedCache, enable_metrics: bool) -> Reporter:
    """Report on this process's cache.

    Of tensor- and pipeline-parallel ranks the first speaks for all, in metrics as well; the
    others show what must be equal. Data-parallel replicas speak for themselves.
    """
    from sglang.srt.runtime_context import get_observability, get_parallel

    parallel = get_parallel()
    rank = parallel.dp_rank if parallel.dp_rank is not None else parallel.attn_dp_rank
    place = {"pp": parallel.pp_rank, "cp": parallel.attn_cp_rank, "tp": parallel.attn_tp_rank}
    peer = "-".join(f"{name}{number}" for name, number in place.items() if number)
    metrics = None
    if enable_metrics and not peer:
        metrics = Metrics(rank, get_observability().extra_metric_labels)
    reporter = Reporter(cache, rank, metrics, peer)
    reporter.start()
    return reporter
