"""Metric series of reused documents, and the thread that reports them, for any cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang_canopy.telemetry.metrics import Metrics
from sglang_canopy.telemetry.reporter import PeriodicReporter, rank_and_peer
from sglang_canopy.telemetry.series import Metric, status_metric
from sglang_canopy.wire import status_file

STATUS = "documents"
"""Kind of the status file, and key in ``/canopy/status``."""

METRICS = (
    status_metric(
        "documents_fused_requests_total", "fused_requests", "requests that reused KV of documents"
    ),
    status_metric(
        "documents_reused_tokens_total", "reused_tokens", "tokens of documents that these reused"
    ),
    status_metric(
        "documents_recomputed_tokens_total",
        "recomputed_tokens",
        "tokens of stored documents that these recomputed",
    ),
    status_metric(
        "documents_kept_requests_total",
        "kept_requests",
        "requests that extended reused KV of an earlier prompt",
    ),
    status_metric("documents_kept_tokens_total", "kept_tokens", "tokens of that KV"),
    status_metric(
        "documents_not_fused_total",
        "not_fused.{reason}",
        "requests with documents that ran normally, and why",
    ),
    status_metric(
        "documents_fallbacks_total",
        "fallbacks",
        "failures of document reuse, after which a request or batch ran normally",
    ),
    status_metric(
        "documents_checked_total",
        "quality.checked",
        "answers with reuse that were compared with full recompute",
    ),
    status_metric("documents_differed_total", "quality.differed", "compared answers that differed"),
    Metric(
        "documents_tenants",
        "gauge",
        ("step",),
        "tenants whose ratio is raised, or whose reuse is stopped, because too many answers differed",
    ),
    status_metric(
        "documents_stored_bytes", "store.tiers.{tier}.used_bytes", "KV of documents in the store"
    ),
)


def update(metrics: Metrics, documents: Mapping[str, Any]) -> None:
    """Update every series from the counts in ``documents``, as in ``/server_info``."""
    metrics.export_status(documents)
    for step in ("raised", "stopped"):
        metrics.set_gauge("documents_tenants", documents["quality"][f"tenants_{step}"], step)


class DocumentReporter(PeriodicReporter):
    """Reports the counts of documents, with any cache."""

    def __init__(
        self, counters: Callable[[], Mapping[str, Any]], metrics: Metrics | None, rank: int = 0
    ) -> None:
        self.counters = counters
        self.metrics = metrics
        self.rank = rank
        super().__init__()

    def report(self) -> dict[str, Any]:
        """One report, now."""
        counts = dict(self.counters())
        status_file.write_status(self.rank, counts, kind=STATUS)
        if self.metrics is not None:
            update(self.metrics, counts)
        return counts


def start(counters: Callable[[], Mapping[str, Any]], enable_metrics: bool) -> None:
    """Report the counts of documents, on the first tensor-parallel rank only."""
    from sglang.srt.runtime_context import get_observability

    rank, peer = rank_and_peer()
    if not peer:
        labels = get_observability().extra_metric_labels
        metrics = Metrics(rank, labels, metrics=METRICS) if enable_metrics else None
        DocumentReporter(counters, metrics, rank).start()
