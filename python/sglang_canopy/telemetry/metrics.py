"""Canopy's series on SGLang's own ``/metrics``.

SGLang runs Prometheus' client in its multiprocess mode: each process writes its series to a file,
and the process that serves ``/metrics`` reads only the files. A custom collector does not work
there. In the scheduler's process it is never called, and in the HTTP process it would need the
registry that ``add_prometheus_middleware`` creates and does not expose (a server's further machines
have another). So ``Metrics`` sets ordinary series in the scheduler's process: ``reporter.py``
passes the status and counters of one rank every second, outside the scheduler's thread. Labels are
bounded: categories are capped (``counters.MAX_CATEGORIES``), and groups are labelled by index.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sglang_canopy.radix.counters import REASONS, TIERS, CategoryCounts, Counters
from sglang_canopy.telemetry.series import CACHE_METRICS, PREFIX, RANK_LABEL, Metric

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


COUNTERS_FROM_ZERO = {
    "disk_faults_total",
    "gate_admitted_sessions_total",
    "limit_refusals_total",
    "rank_disagreements_total",
}
"""Counters of the alerts, exported from the start: Prometheus sees no increase in a first value."""


class Metrics:
    """Prometheus series of one rank. ``operator_labels``: labels that the operator adds to every
    series. Create it after ``PROMETHEUS_MULTIPROC_DIR`` is set, once per process (or per
    ``registry``) for the same ``metrics``."""

    def __init__(
        self,
        rank: int,
        operator_labels: Mapping[str, str] | None = None,
        registry: CollectorRegistry | None = None,
        metrics: Iterable[Metric] = CACHE_METRICS,
    ) -> None:
        self._fixed_labels = {RANK_LABEL: str(rank), **(operator_labels or {})}
        self._families: dict[str, Any] = {}
        self._metrics = tuple(metrics)
        for metric in self._metrics:
            self._families |= _make_family(metric, tuple(self._fixed_labels), registry)
        self._exported_values: dict[tuple[str, tuple[str, ...]], float] = {}
        """Value exported so far, by metric and labels."""
        self._series: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._labels_of_gauge: dict[str, set[tuple[str, ...]]] = {}
        """Labels of the series that ``_set_gauges`` set last, by metric."""

    def update(self, counters: Counters, status: Mapping[str, Any]) -> None:
        """Update every series from ``counters`` and ``StatusCollector.collect``."""
        for category_counts in counters.all_counts():
            self._update_category(category_counts, status["tiers"])
        self.export_status(status)
        for category in status["categories"]:
            for tier, tokens in category["held_tokens"].items():
                if tier in status["tiers"]:
                    self.set_gauge("held_tokens", tokens, tier, category["category"])
        groups = ((group["tier"], group["group"], group["ttl_s"]) for group in status["groups"])
        ttls_s: dict[tuple[str, ...], float] = {
            (tier, group): math.inf if ttl_s is None else ttl_s for tier, group, ttl_s in groups
        }
        self._set_gauges("group_ttl_seconds", ttls_s)
        self._update_disk(status.get("disk"), status["page_tokens"])

    def export_status(self, status: Mapping[str, Any]) -> None:
        """Update every series whose values are in ``status``, which may be a part of one."""
        for metric in self._metrics:
            for value, labels in metric.values(status):
                update = self.raise_counter if metric.kind == "counter" else self.set_gauge
                update(metric.name, value, *labels)
        self._update_whatif(status.get("whatif"))

    def _update_category(self, counts: CategoryCounts, tiers: Iterable[str]) -> None:
        category = counts.category
        self.raise_counter("requests_total", counts.requests, category)
        self.raise_counter("prompt_tokens_total", counts.prompt_tokens, category)
        self.raise_counter("miss_tokens_total", counts.missed_tokens, category)
        for tier, tier_counts in zip(TIERS, counts.tiers):
            if tier not in tiers:
                continue
            labels = (tier, category)
            self.raise_counter("hit_tokens_total", tier_counts.hit_tokens, *labels)
            self.raise_counter("entered_tokens_total", tier_counts.entered_tokens, *labels)
            self.raise_counter("demoted_tokens_total", tier_counts.demoted_tokens, *labels)
            for reason, tokens in zip(REASONS, tier_counts.evicted_tokens):
                self.raise_counter("evicted_tokens_total", tokens, *labels, reason)

    def _set_gauges(self, name: str, values: Mapping[tuple[str, ...], float]) -> None:
        """Set a gauge to ``values``, by labels. A series of other labels, which stays in this process's
        file, becomes NaN."""
        for labels in self._labels_of_gauge.get(name, set()) - values.keys():
            self.set_gauge(name, math.nan, *labels)
        for labels, value in values.items():
            self.set_gauge(name, value, *labels)
        self._labels_of_gauge[name] = {*values}

    def _update_disk(self, disk: Mapping[str, Any] | None, page_tokens: int) -> None:
        if disk is None:
            return
        for reason, pages in disk["evicted_pages"].items():
            self.raise_counter("evicted_tokens_total", pages * page_tokens, "disk", "all", reason)
        self.raise_counter(
            "entered_tokens_total", disk["written_pages"] * page_tokens, "disk", "all"
        )

    def _update_whatif(self, meter: Mapping[str, Any] | None) -> None:
        if meter is None:
            return
        arms: dict[tuple[str, ...], float] = {
            (arm["policy"], arm["capacity"]): arm["hit_ratio"] for arm in meter["arms"]
        }
        self._set_gauges("whatif_hit_ratio", arms)
        self.set_gauge("whatif_decided", float(meter["undecided"] is None))

    def _find_series(self, name: str, labels: tuple[str, ...]) -> Any:
        series = self._series.get((name, labels))
        if series is None:
            series = self._families[name].labels(*self._fixed_labels.values(), *labels)
            self._series[name, labels] = series
        return series

    def set_gauge(self, name: str, value: float, *labels: str) -> None:
        if self._exported_values.get((name, labels)) != value:
            self._find_series(name, labels).set(value)
            self._exported_values[name, labels] = value

    def raise_counter(self, name: str, total: float, *labels: str) -> None:
        """Raise a counter to ``total``. A series is exported from its first count on; series of
        ``COUNTERS_FROM_ZERO`` at once."""
        previous = self._exported_values.get((name, labels))
        increase = total - (previous or 0)
        if increase > 0 or (previous is None and name in COUNTERS_FROM_ZERO):
            self._find_series(name, labels).inc(increase)
            self._exported_values[name, labels] = total


def _make_family(
    metric: Metric, fixed_labels: tuple[str, ...], registry: CollectorRegistry | None
) -> dict[str, Any]:
    """Return the client's objects for one metric, by series name without ``PREFIX``."""
    # The client reads PROMETHEUS_MULTIPROC_DIR when it is imported.
    from prometheus_client import REGISTRY, Counter, Gauge

    registry = registry or REGISTRY
    name, labels = PREFIX + metric.name, (*fixed_labels, *metric.labels)
    if metric.kind == "counter":
        return {metric.name: Counter(name, metric.meaning, labels, registry=registry)}
    # One process writes a series; a restarted rank replaces its predecessor.
    gauge = Gauge(name, metric.meaning, labels, multiprocess_mode="mostrecent", registry=registry)
    return {metric.name: gauge}
