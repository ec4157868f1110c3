"""Series of reused documents, and the thread that reports them with any cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang_canopy.telemetry.metric import Metric
from sglang_canopy.telemetry.metrics import Metrics
from sglang_canopy.telemetry.reporter import Periodic, place
from sglang_canopy.wire import status_file

STATUS = "documents"
"""Kind of the status file, and key in ``/canopy/status``."""

METRICS = (
    Metric("documents_fused_requests_total", "counter", (), "requests that reused KV of documents"),
    Metric("documents_reused_tokens_total", "counter", (), "tokens of documents that these reused"),
    Metric(
        "documents_recomputed_tokens_total",
        "counter",
        (),
        "tokens of stored documents that these recomputed",
    ),
    Metric(
        "documents_kept_requests_total",
        "counter",
        (),
        "requests that extended reused KV of an earlier prompt",
    ),
    Metric("documents_kept_tokens_total", "counter", (), "tokens of that KV"),
    Metric(
        "documents_not_fused_total",
        "counter",
        ("reason",),
        "requests with documents that ran normally, and why",
    ),
    Metric(
        "documents_fallbacks_total",
        "counter",
        (),
        "failures of document reuse, after which a request or batch ran normally",
    ),
    Metric(
        "documents_checked_total",
        "counter",
        (),
        "answers with reuse that were compared with full recompute",
    ),
    Metric("documents_differed_total", "counter", (), "compared answers that differed"),
    Metric(
        "documents_tenants",
        "gauge",
        ("step",),
        "tenants whose ratio is raised, or whose reuse is stopped, because too many answers differed",
    ),
    Metric(
        "documents_tenant_differ_ratio",
        "gauge",
        ("tenant",),
        "share of a tenant's compared answers that differed (32 tenants at most)",
    ),
    Metric("documents_stored_bytes", "gauge", ("tier",), "KV of documents in the store"),
)


def update(metrics: Metrics, documents: Mapping[str, Any]) -> None:
    """Update every series from the counts in ``documents``, as in ``/server_info``."""
    for name in (
        *("fused_requests", "reused_tokens", "recomputed_tokens", "fallbacks"),
        *("kept_requests", "kept_tokens"),
    ):
        metrics.count(f"documents_{name}_total", documents[name])
    for reason, requests in documents["not_fused"].items():
        metrics.count("documents_not_fused_total", requests, reason)
    quality = documents["quality"]
    for name in ("checked", "differed"):
        metrics.count(f"documents_{name}_total", quality[name])
    for step in ("raised", "stopped"):
        metrics.set("documents_tenants", quality[f"tenants_{step}"], step)
    for tenant, one in quality["tenants"].items():
        metrics.set("documents_tenant_differ_ratio", one["differed"] / one["checked"], tenant)
    for tier, sizes in documents["store"]["tiers"].items():
        metrics.set("documents_stored_bytes", sizes["used_bytes"], tier)


class Reporter(Periodic):
    """Reports the counts of documents, with any cache."""

    def __init__(
        self, counted: Callable[[], Mapping[str, Any]], metrics: Metrics | None, rank: int = 0
    ) -> None:
        self.counted = counted
        self.metrics = metrics
        self.rank = rank
        super().__init__()

    def report(self) -> dict[str, Any]:
        """One report, now."""
        counted = dict(self.counted())
        status_file.write(self.rank, counted, kind=STATUS)
        if self.metrics is not None:
            update(self.metrics, counted)
        return counted


def start(counted: Callable[[], Mapping[str, Any]], enable_metrics: bool) -> None:
    """Report the counts of documents, on the first tensor-parallel rank only."""
    from sglang.srt.runtime_context import get_observability

    rank, peer = place()
    if not peer:
        labels = get_observability().extra_metric_labels
        metrics = Metrics(rank, labels, metrics=METRICS) if enable_metrics else None
        Reporter(counted, metrics, rank).start()
