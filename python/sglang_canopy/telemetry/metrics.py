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

from sglang_canopy.radix.counters import REASONS, TIERS, Counters, Row
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
    """Prometheus series of one rank. ``operator_labels``: labels that the operator adds to every series.

    Create it after ``PROMETHEUS_MULTIPROC_DIR`` is set, once per process (or per ``registry``) for
    the same ``metrics``.
    """

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
        self._exported: dict[tuple[str, tuple[str, ...]], float] = {}
        """Value exported so far, by metric and labels."""
        self._series: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._row_labels: dict[str, set[tuple[str, ...]]] = {}
        """Labels of the rows that ``_set_rows`` set last, by metric."""

    def update(self, counters: Counters, status: Mapping[str, Any]) -> None:
        """Update every series from ``counters`` and ``Status.collect``."""
        for row in counters.rows():
            self._update_row(row, status["tiers"])
        self.export_status(status)
        for row in status["categories"]:
            for tier, tokens in row["held_tokens"].items():
                if tier in status["tiers"]:
                    self.set_gauge("held_tokens", tokens, tier, row["category"])
        groups = ((row["tier"], row["group"], row["ttl_s"]) for row in status["groups"])
        self._set_rows(
            "group_ttl_seconds", {(t, g): math.inf if s is None else s for t, g, s in groups}
        )
        self._update_disk(status.get("disk"), status["page_tokens"])

    def export_status(self, status: Mapping[str, Any]) -> None:
        """Update every series whose values are in ``status``, which may be a part of one."""
        for metric in self._metrics:
            for value, labels in metric.values(status):
                update = self.raise_counter if metric.kind == "counter" else self.set_gauge
                update(metric.name, value, *labels)
        self._update_whatif(status.get("whatif"))

    def _update_row(self, row: Row, tiers: Iterable[str]) -> None:
        category = row.category
        self.raise_counter("requests_total", row.requests, category)
        self.raise_counter("prompt_tokens_total", row.prompt_tokens, category)
        self.raise_counter("miss_tokens_total", row.missed_tokens, category)
        for tier, tier_row in zip(TIERS, row.tiers):
            if tier not in tiers:
                continue
            labels = (tier, category)
            self.raise_counter("hit_tokens_total", tier_row.hit_tokens, *labels)
            self.raise_counter("entered_tokens_total", tier_row.entered_tokens, *labels)
            self.raise_counter("demoted_tokens_total", tier_row.demoted_tokens, *labels)
            for reason, tokens in zip(REASONS, tier_row.evicted_tokens):
                self.raise_counter("evicted_tokens_total", tokens, *labels, reason)

    def _set_rows(self, name: str, rows: Mapping[tuple[str, ...], float]) -> None:
        """Set a gauge for each of ``rows``, labels -> value; NaN for those that are no longer there,
        whose series stay in this process's file."""
        for labels in self._row_labels.get(name, set()) - rows.keys():
            self.set_gauge(name, math.nan, *labels)
        for labels, value in rows.items():
            self.set_gauge(name, value, *labels)
        self._row_labels[name] = {*rows}

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
        self._set_rows("whatif_hit_ratio", arms)
        self.set_gauge("whatif_decided", float(meter["undecided"] is None))

    def _series_of(self, name: str, labels: tuple[str, ...]) -> Any:
        series = self._series.get((name, labels))
        if series is None:
            series = self._families[name].labels(*self._fixed_labels.values(), *labels)
            self._series[name, labels] = series
        return series

    def set_gauge(self, name: str, value: float, *labels: str) -> None:
        if self._exported.get((name, labels)) != value:
            self._series_of(name, labels).set(value)
            self._exported[name, labels] = value

    def raise_counter(self, name: str, total: float, *labels: str) -> None:
        """Raise a counter to ``total``. A series is exported from its first count on; series of
        ``COUNTERS_FROM_ZERO`` at once."""
        previous = self._exported.get((name, labels))
        increase = total - (previous or 0)
        if increase > 0 or (previous is None and name in COUNTERS_FROM_ZERO):
            self._series_of(name, labels).inc(increase)
            self._exported[name, labels] = total


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
