"""Counts of documents are on ``/metrics``, next to the series of any cache."""

from prometheus_client import CollectorRegistry

from canopy_documents.plugin import series
from sglang_canopy.telemetry.metrics import Metrics


def test_counts_are_shown_by_reason_and_tier() -> None:
    registry = CollectorRegistry()
    Metrics(0, registry=registry)  # a cache's series, in the same process
    counts = {
        "fused_requests": 1,
        "reused_tokens": 111,
        "recomputed_tokens": 20,
        "kept_requests": 3,
        "kept_tokens": 500,
        "fallbacks": 0,
        "not_fused": {"lora": 2},
        "quality": {"checked": 8, "differed": 2, "tenants_raised": 1, "tenants_stopped": 0},
        "store": {"tiers": {"memory": {"used_bytes": 4096}}},
    }
    metrics = Metrics(0, registry=registry, metrics=series.METRICS)
    reporter = series.DocumentReporter(lambda: counts, metrics)
    reporter.report()
    counts["reused_tokens"], counts["not_fused"] = 300, {"lora": 2, "multimodal": 1}
    reporter.report()

    def sample(name, **labels):
        return registry.get_sample_value(f"canopy:documents_{name}", {"dp_rank": "0", **labels})

    assert sample("fused_requests_total") == 1
    assert sample("reused_tokens_total") == 300
    assert (sample("kept_requests_total"), sample("kept_tokens_total")) == (3, 500)
    assert sample("not_fused_total", reason="lora") == 2
    assert sample("not_fused_total", reason="multimodal") == 1
    assert sample("stored_bytes", tier="memory") == 4096
    assert (sample("checked_total"), sample("differed_total")) == (8, 2)
    assert (sample("tenants", step="raised"), sample("tenants", step="stopped")) == (1, 0)
