"""The thread that reports a scheduler process's counts, once a second.

The scheduler's own thread only adds integers. This thread reads them, writes the status file and,
with ``--enable-metrics``, SGLang's metrics. It works in slices of about a millisecond.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang_canopy.radix.counters import REFUSALS
from sglang_canopy.telemetry.auto_line import AutoLine
from sglang_canopy.telemetry.metrics import Metrics
from sglang_canopy.telemetry.status import StatusCollector, agreement
from sglang_canopy.whatif.meter import Meter
from sglang_canopy.wire import status_file

if TYPE_CHECKING:
    from sglang_canopy.radix.cache import CanopyRadixCache

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0
_SLICE_PAUSE_S = 0.002


class PeriodicReporter:
    """A thread that calls ``report`` every ``REPORT_INTERVAL_S`` until the process ends (or ``stop``)."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        """CPU seconds of this thread."""
        self._has_failed = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="canopy-report", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def report(self) -> dict[str, Any]:
        raise NotImplementedError

    def _run(self) -> None:
        while not self._stopped.wait(REPORT_INTERVAL_S):
            try:
                self.report()
            except Exception:  # a failed report must not stop the server
                if not self._has_failed:
                    self._has_failed = True
                    logger.warning("canopy: cannot report (logged once)", exc_info=True)
            self.spent_s = time.thread_time()


class Reporter(PeriodicReporter):
    """Reports on one cache until the process ends (or ``stop``). ``peer``: set on tensor- and
    pipeline-parallel ranks other than the first, whose trees have the same nodes and would repeat
    its counts. They report only the values that must be equal on all ranks."""

    def __init__(
        self,
        cache: CanopyRadixCache,
        rank: int,
        metrics: Metrics | None,
        peer: str = "",
        auto_line: AutoLine | None = None,
    ) -> None:
        self.collector = StatusCollector(cache, rank)
        self.metrics = metrics
        self.peer = peer
        self.auto_line = auto_line
        super().__init__()

    def report(self) -> dict[str, Any]:
        """Report now. Return the status."""
        if self.peer:
            status = agreement(self.collector.counters, self.collector.session_gate())
            status_file.write_status(self.collector.rank, status, self.peer)
            return status
        now = time.monotonic()
        status = self.collector.collect(now, lambda: time.sleep(_SLICE_PAUSE_S))
        if self.auto_line is not None:
            self.auto_line.add_to(status, now)
        status["reporting_s"] = self.spent_s
        status_file.write_status(self.collector.rank, status)
        if self.metrics is not None:
            self.metrics.update(self.collector.counters, status)
        return status


class ObserverReporter(PeriodicReporter):
    """Reports a meter's results, and refused requests, for a cache that is not Canopy's."""

    def __init__(
        self, meter: Meter, refusal_counts: Sequence[int], rank: int, metrics: Metrics | None
    ) -> None:
        """``refusal_counts``: current counts, in the order of ``REFUSALS``."""
        self.meter = meter
        self.refusal_counts = refusal_counts
        self.rank = rank
        self.metrics = metrics
        super().__init__()

    def report(self) -> dict[str, Any]:
        """Report now. Return the status."""
        stats = self.meter.stats()
        refused = dict(zip(REFUSALS, self.refusal_counts, strict=True))
        status = {"rank": self.rank, "whatif": stats, "refused_requests": refused}
        status_file.write_status(self.rank, status, kind=status_file.OBSERVED)
        if self.metrics is not None:
            self.metrics.export_status(status)
        return status


def start_observer_reporter(
    meter: Meter, refusal_counts: Sequence[int], enable_metrics: bool
) -> None:
    """Report on SGLang's own cache, on the first tensor-parallel rank only. ``refusal_counts``:
    current counts, in the order of ``REFUSALS``."""
    rank, peer = rank_and_peer()
    if not peer:
        ObserverReporter(meter, refusal_counts, rank, _make_metrics(rank, enable_metrics)).start()


def start_reporter(
    cache: CanopyRadixCache, enable_metrics: bool, auto_line: AutoLine | None = None
) -> Reporter:
    """Report on this process's cache. ``auto_line``: of ``--radix-eviction auto``. The first tensor-
    and pipeline-parallel rank reports for all, including metrics. The other ranks report only the
    values that must be equal. Data-parallel replicas report separately."""
    rank, peer = rank_and_peer()
    reporter = Reporter(
        cache, rank, _make_metrics(rank, enable_metrics and not peer), peer, auto_line
    )
    reporter.start()
    return reporter


def _make_metrics(rank: int, is_enabled: bool) -> Metrics | None:
    from sglang.srt.runtime_context import get_observability

    return Metrics(rank, get_observability().extra_metric_labels) if is_enabled else None


def write_answer(name: str, answer: Any) -> None:
    """Write an answer for the HTTP process, on the first tensor-parallel rank only."""
    rank, peer = rank_and_peer()
    if not peer:
        status_file.write_status(rank, answer, kind=status_file.ANSWER + name)


def rank_and_peer() -> tuple[int, str]:
    """Return this process's data-parallel rank, and its name among its peers (empty: the first)."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    rank = parallel.dp_rank if parallel.dp_rank is not None else parallel.attn_dp_rank
    ranks = {"pp": parallel.pp_rank, "cp": parallel.attn_cp_rank, "tp": parallel.attn_tp_rank}
    return rank, "-".join(f"{name}{number}" for name, number in ranks.items() if number)
