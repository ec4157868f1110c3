"""Canopy's series on SGLang's own ``/metrics``.

SGLang runs Prometheus' client in its multiprocess mode: each process keeps its series in a file,
and whoever answers ``/metrics`` reads the files alone. A custom collector does not fit in there:
one in the scheduler's process is never asked, and one in the HTTP process would need the registry
that SGLang makes inside ``add_prometheus_middleware`` and shows to nobody (another one answers on
a server's further machines). So ``Metrics`` sets ordinary series, in the scheduler's process:
``reporter.py`` gives it the status and counters of one rank every second, off the scheduler's
thread. Labels are bounded: categories are capped (``counters.MAX_CATEGORIES``), groups go by index.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from sglang_canopy.radix.counters import (
    EDGES_S,
    MAX_CATEGORIES,
    OTHER,
    PAST,
    REASONS,
    TIERS,
    Counters,
    Row,
)
from sglang_canopy.telemetry import adapter_series
from sglang_canopy.telemetry.metric import Metric

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


MAX_SERIES = 4 * MAX_CATEGORIES
"""Categories with series of their own while the process lives: a series cannot be taken back."""
_Reported = dict[tuple[str, tuple[str, ...]], Any]
"""What a series was brought to already, by metric and labels."""

_LE = (*(str(float(edge)) for edge in EDGES_S), "+Inf")
"""Upper edges of the residency histogram's buckets, as Prometheus writes them."""

PREFIX = "canopy:"
RANK_LABEL = "dp_rank"

METRICS = (
    Metric("requests_total", "counter", ("category",), "requests that finished"),
    Metric("prompt_tokens_total", "counter", ("category",), "prompt tokens of these requests"),
    Metric(
        "hit_tokens_total",
        "counter",
        ("tier", "category"),
        "prompt tokens that were found in the tier",
    ),
    Metric("miss_tokens_total", "counter", ("category",), "prompt tokens that no tier had"),
    Metric(
        "entered_tokens_total",
        "counter",
        ("tier", "category"),
        "tokens that came into the tier: computed, copied down to it or brought up to it",
    ),
    Metric(
        "evicted_tokens_total",
        "counter",
        ("tier", "category", "reason"),
        "tokens that left the tier, and why",
    ),
    Metric(
        "demoted_tokens_total",
        "counter",
        ("tier", "category"),
        "the part of the device's evicted tokens that the host still has",
    ),
    Metric(
        "residency_seconds",
        "histogram",
        ("tier", "category"),
        "how long tokens stayed in the tier before they were evicted; a token counts once",
    ),
    Metric("capacity_bytes", "gauge", ("tier",), "what the tier can hold, on this rank"),
    Metric("used_bytes", "gauge", ("tier",), "what is not free, on this rank"),
    Metric(
        "held_tokens",
        "gauge",
        ("tier", "category"),
        "cached tokens by the category of their last user; counted every 5 s or less often",
    ),
    Metric("kv_bytes_per_token", "gauge", (), "bytes of one token's KV, on this rank"),
    Metric("tree_nodes", "gauge", (), "nodes of the radix tree"),
    Metric(
        "group_ttl_seconds",
        "gauge",
        ("tier", "group"),
        "TTL of a subtree group, by its index in the table (`residual`: all other prefixes); "
        "`+Inf` never expires, `NaN` is a group of an older table",
    ),
    Metric(
        "disk_read_bytes_total", "counter", (), "bytes read from the disk store, after compression"
    ),
    Metric(
        "disk_written_bytes_total",
        "counter",
        (),
        "bytes written to the disk store, after compression",
    ),
    Metric(
        "disk_faults_total",
        "counter",
        ("kind",),
        "faults of the disk tier that were answered by recomputation",
    ),
    Metric(
        "copy_ahead_tokens_total",
        "counter",
        ("outcome",),
        "tokens that `--canopy-copy-ahead` copied to the host (`copied`); of these, evicted without "
        "a wait (`used`) and given up by the host before (`wasted`); copied for the disk alone "
        "(`for_disk`)",
    ),
    Metric(
        "copy_ahead_stalls_total",
        "counter",
        (),
        "evictions that waited for a copy, since none was ready",
    ),
    Metric(
        "copy_ahead_passed_over_total",
        "counter",
        (),
        "evictions that took a leaf with a copy before one of lower rank without",
    ),
    Metric(
        "copy_ahead_window_tokens",
        "gauge",
        ("part",),
        "tokens next in line for eviction that are to have a copy (`wanted`) and that have one "
        "(`covered`)",
    ),
    *adapter_series.METRICS,
    Metric(
        "rank_disagreements_total",
        "counter",
        (),
        "disk reads whose records differed between tensor-parallel ranks, times of use left out; "
        "all ranks then use the first rank's",
    ),
    Metric(
        "queue_let_in_total", "counter", ("by",), "requests let in: by their rank, or their age"
    ),
    Metric(
        "gate_waiting_sessions",
        "gauge",
        (),
        "sessions that the session gate holds, or has refused and keeps a place for",
    ),
    Metric("gate_active_sessions", "gauge", (), "sessions that it has admitted and not forgotten"),
    Metric("gate_footprint_tokens", "gauge", (), "KV that these are expected to need"),
    Metric("gate_budget_tokens", "gauge", (), "what that may add up to"),
    Metric("gate_admitted_sessions_total", "counter", (), "sessions that it admitted"),
    Metric("gate_delayed_sessions_total", "counter", (), "those of them that had to wait"),
    Metric("gate_wait_seconds_total", "counter", (), "their waits added up"),
    Metric("gate_refused_requests_total", "counter", (), "requests answered with status 429"),
    Metric(
        "gate_revoked_sessions_total",
        "counter",
        (),
        "sessions of tenants above their share that lost their place to another tenant's",
    ),
    Metric(
        "gate_forgotten_sessions_total",
        "counter",
        (),
        "sessions taken for over after a silence, or because there were too many",
    ),
    Metric(
        "reporting_seconds_total",
        "counter",
        (),
        "CPU time of the thread that makes these numbers",
    ),
)
"""Every series, in the order of ``docs/reference/metrics.md``."""


class Metrics:
    """The Prometheus side of one rank. ``extra``: labels the operator adds to every series.

    Make it after ``PROMETHEUS_MULTIPROC_DIR`` is set, once a process (or once a ``registry``).
    """

    def __init__(
        self,
        rank: int,
        extra: Mapping[str, str] | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._fixed = {RANK_LABEL: str(rank), **(extra or {})}
        self._families: dict[str, Any] = {}
        for metric in METRICS:
            self._families |= _families(metric, tuple(self._fixed), registry)
        self._reported: _Reported = {}
        self._rows: dict[str, tuple[Row, _Reported]] = {}
        self._categories: set[str] = {OTHER}
        self._series: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._groups: set[tuple[str, str]] = set()

    def update(self, counters: Counters, status: Mapping[str, Any]) -> None:
        """Bring every series to what ``counters`` and ``Status.take`` say."""
        self._update_rows(counters, status["tiers"])
        for tier, sizes in status["tiers"].items():
            for name in ("capacity_bytes", "used_bytes"):
                if sizes[name] is not None:
                    self._set(name, sizes[name], tier)
        for row in status["categories"]:
            if row["category"] not in self._categories:
                continue
            for tier, tokens in row["held_tokens"].items():
                if tier in status["tiers"]:
                    self._set("held_tokens", tokens, tier, row["category"])
        self._set("kv_bytes_per_token", status["kv_bytes_per_token"])
        self._set("tree_nodes", status["nodes"])
        self._update_groups(status["groups"])
        self._update_disk(status.get("disk"), status["page_tokens"])
        self._update_gate(status.get("session_gate"))
        self._update_copies(status.get("copy_ahead"))
        for by, requests in ((status.get("queue") or {}).get("let_in") or {}).items():
            self._count("queue_let_in_total", requests, by)
        adapter_series.update(self._count, status)
        self._count("rank_disagreements_total", status["agreement"]["records_disagreed"])
        self._count("reporting_seconds_total", status["reporting_s"])

    def _update_rows(self, counters: Counters, tiers: Iterable[str]) -> None:
        """A category that was given another row goes on from where its series are."""
        before, self._rows = self._rows, {}
        for row in counters.rows():
            if row.category == PAST:
                continue
            old_row, reported = before.get(row.category, (None, {}))
            if old_row is not row:
                reported = {}
            self._rows[row.category] = (row, reported)
            self._update_row(row, reported, tiers)

    def _update_row(self, row: Row, reported: _Reported, tiers: Iterable[str]) -> None:
        category = self._category_label(row.category)
        self._count("requests_total", row.requests, category, reported=reported)
        self._count("prompt_tokens_total", row.prompt_tokens, category, reported=reported)
        self._count("miss_tokens_total", row.misses, category, reported=reported)
        for tier, counted in zip(TIERS, row.tiers):
            if tier not in tiers:
                continue
            labels = (tier, category)
            self._count("hit_tokens_total", counted.hits, *labels, reported=reported)
            self._count("entered_tokens_total", counted.entered, *labels, reported=reported)
            self._count("demoted_tokens_total", counted.demoted, *labels, reported=reported)
            for reason, tokens in zip(REASONS, counted.evicted):
                self._count("evicted_tokens_total", tokens, *labels, reason, reported=reported)
            stay = counted.residency
            self._count_residency(stay.tokens, stay.token_seconds, *labels, reported=reported)

    def _category_label(self, category: str) -> str:
        """The label of a category's series: its own, or ``OTHER`` after ``MAX_SERIES``."""
        if category not in self._categories:
            if len(self._categories) > MAX_SERIES:
                return OTHER
            self._categories.add(category)
        return category

    def _update_groups(self, groups: Iterable[Mapping[str, Any]]) -> None:
        gone = set(self._groups)
        for group in groups:
            labels, ttl_s = (group["tier"], group["group"]), group["ttl_s"]
            self._set("group_ttl_seconds", math.inf if ttl_s is None else ttl_s, *labels)
            self._groups.add(labels)
            gone.discard(labels)
        for labels in gone:  # of an older table: its series stays in this process's file
            self._set("group_ttl_seconds", math.nan, *labels)
            self._groups.discard(labels)

    def _update_disk(self, disk: Mapping[str, Any] | None, page_tokens: int) -> None:
        if disk is None:
            return
        for reason, pages in disk["evicted_pages"].items():
            self._count("evicted_tokens_total", pages * page_tokens, "disk", "all", reason)
        tokens = [pages * page_tokens for pages in disk["residency_pages"]]
        token_seconds = disk["residency_page_seconds"] * page_tokens
        self._count_residency(tokens, token_seconds, "disk", "all")
        self._count("entered_tokens_total", disk["written_pages"] * page_tokens, "disk", "all")
        self._count("disk_read_bytes_total", disk["read_bytes"])
        self._count("disk_written_bytes_total", disk["written_bytes"])
        for kind, times in disk["faults"].items():
            self._count("disk_faults_total", times, kind)

    def _update_gate(self, gate: Mapping[str, Any] | None) -> None:
        if gate is None:
            return
        for name in ("waiting_sessions", "active_sessions", "footprint_tokens", "budget_tokens"):
            self._set(f"gate_{name}", gate[name])
        for name in (
            *("admitted_sessions", "delayed_sessions", "wait_seconds", "refused_requests"),
            *("revoked_sessions", "forgotten_sessions"),
        ):
            self._count(f"gate_{name}_total", gate[name])

    def _update_copies(self, ahead: Mapping[str, int] | None) -> None:
        if ahead is None:
            return
        for outcome in ("copied", "used", "wasted", "for_disk"):
            self._count("copy_ahead_tokens_total", ahead[outcome], outcome)
        for what in ("stalls", "passed_over"):
            self._count(f"copy_ahead_{what}_total", ahead[what])
        self._set("copy_ahead_window_tokens", ahead["window_tokens"], "wanted")
        self._set("copy_ahead_window_tokens", ahead["covered_tokens"], "covered")

    def _series_of(self, name: str, labels: tuple[str, ...]) -> Any:
        series = self._series.get((name, labels))
        if series is None:
            series = self._families[name].labels(*self._fixed.values(), *labels)
            self._series[name, labels] = series
        return series

    def _set(self, name: str, value: float, *labels: str) -> None:
        if self._reported.get((name, labels)) != value:
            self._series_of(name, labels).set(value)
            self._reported[name, labels] = value

    def _count(
        self, name: str, total: float, *labels: str, reported: _Reported | None = None
    ) -> None:
        """Raise a counter by what ``total`` is above ``reported``. Series appear when they count."""
        reported = self._reported if reported is None else reported
        more = total - reported.get((name, labels), 0)
        if more > 0:
            self._series_of(name, labels).inc(more)
            reported[name, labels] = total

    def _count_residency(
        self,
        bins: list[int],
        token_seconds: float,
        *labels: str,
        reported: _Reported | None = None,
    ) -> None:
        """Raise the residency histogram by what ``bins`` and their sum are above ``reported``."""
        name = "residency_seconds"
        reported = self._reported if reported is None else reported
        before, seconds_before = reported.get((name, labels), ([0] * len(bins), 0.0))
        if bins == before:
            return
        more = accumulate(new - old for new, old in zip(bins, before))
        for edge, tokens in zip(_LE, more):
            self._series_of(f"{name}_bucket", (*labels, edge)).inc(tokens)
        self._series_of(f"{name}_count", labels).inc(sum(bins) - sum(before))
        self._series_of(f"{name}_sum", labels).inc(token_seconds - seconds_before)
        reported[name, labels] = (list(bins), token_seconds)


def _families(
    metric: Metric, fixed: tuple[str, ...], registry: CollectorRegistry | None
) -> dict[str, Any]:
    """The client's objects for one metric, by the names of their series without ``PREFIX``."""
    # The client looks at PROMETHEUS_MULTIPROC_DIR when it is imported.
    from prometheus_client import REGISTRY, Counter, Gauge

    registry = registry or REGISTRY
    name, labels = PREFIX + metric.name, (*fixed, *metric.labels)
    if metric.kind == "counter":
        return {metric.name: Counter(name, metric.meaning, labels, registry=registry)}
    if metric.kind == "gauge":
        # One process writes a series; a rank that was started anew replaces the one before.
        gauge = Gauge(
            name, metric.meaning, labels, multiprocess_mode="mostrecent", registry=registry
        )
        return {metric.name: gauge}
    return {
        f"{metric.name}_{part}": Gauge(
            f"{name}_{part}",
            metric.meaning,
            (*labels, *own),
            multiprocess_mode="sum",
            registry=registry,
        )
        for part, own in (("bucket", ("le",)), ("count", ()), ("sum", ()))
    }
