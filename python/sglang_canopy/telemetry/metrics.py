"""Canopy's series on SGLang's own ``/metrics``.

SGLang runs Prometheus' client in its multiprocess mode: whatever a process counts lands in a
file that the HTTP process reads. So ``Metrics`` lives in the scheduler process, and is told
the status and counters of one rank every second by ``reporter.py``, off the scheduler's thread.
Labels are bounded: categories are capped (``counters.MAX_CATEGORIES``), groups go by index.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Metric:
    """One series: what ``docs/reference/metrics.md`` says of it, and what Prometheus is told."""

    name: str
    """Without the ``canopy:`` before it. A counter's ends in ``_total``."""
    kind: str
    """``counter``, ``gauge`` or ``histogram``."""
    labels: tuple[str, ...]
    """Its own labels, beside ``RANK_LABEL`` and the operator's (``--extra-metric-labels``)."""
    meaning: str


MAX_SERIES = 4 * MAX_CATEGORIES
"""Categories with series of their own while the process lives: a series cannot be taken back."""
_Shown = dict[tuple[str, tuple[str, ...]], Any]
"""What was shown already, by metric and labels."""

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
        "rank_disagreements_total",
        "counter",
        (),
        "disk reads whose records differed between tensor-parallel ranks, times of use left out; "
        "all ranks then use the first rank's",
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

    Make it after ``PROMETHEUS_MULTIPROC_DIR`` is set, once a process.
    """

    def __init__(self, rank: int, extra: Mapping[str, str] | None = None) -> None:
        import prometheus_client

        self._fixed = {RANK_LABEL: str(rank), **(extra or {})}
        self._families = {m.name: _family(prometheus_client, m, self._fixed) for m in METRICS}
        self._shown: _Shown = {}
        self._rows: dict[str, tuple[Row, _Shown]] = {}
        self._categories: set[str] = {OTHER}
        self._children: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._groups: set[tuple[str, str]] = set()

    def show(self, counters: Counters, status: Mapping[str, Any]) -> None:
        """Bring every series to what ``counters`` and ``Status.take`` say."""
        self._show_rows(counters, status["tiers"])
        for tier, of in status["tiers"].items():
            for name in ("capacity_bytes", "used_bytes"):
                if of[name] is not None:
                    self._set(name, of[name], tier)
        for row in status["categories"]:
            if row["category"] not in self._categories:
                continue
            for tier, tokens in row["held_tokens"].items():
                if tier in status["tiers"]:
                    self._set("held_tokens", tokens, tier, row["category"])
        self._set("kv_bytes_per_token", status["kv_bytes_per_token"])
        self._set("tree_nodes", status["nodes"])
        self._show_groups(status["groups"])
        self._show_disk(status.get("disk"), status["page_tokens"])
        self._raise("rank_disagreements_total", status["agreement"]["records_disagreed"])
        self._raise("reporting_seconds_total", status["reporting_s"])

    def _show_rows(self, counters: Counters, tiers: Iterable[str]) -> None:
        """A category whose row is a new one goes on from what its series shows."""
        before, self._rows = self._rows, {}
        for row in counters.rows():
            if row.category == PAST:
                continue
            known, shown = before.get(row.category, (None, {}))
            if known is not row:
                shown = {}
            self._rows[row.category] = (row, shown)
            self._show_row(row, shown, tiers)

    def _show_row(self, row: Row, shown: _Shown, tiers: Iterable[str]) -> None:
        category = self._series(row.category)
        self._raise("requests_total", row.requests, category, shown=shown)
        self._raise("prompt_tokens_total", row.prompt_tokens, category, shown=shown)
        self._raise("miss_tokens_total", row.misses, category, shown=shown)
        for tier, of in zip(TIERS, row.tiers):
            if tier not in tiers:
                continue
            self._raise("hit_tokens_total", of.hits, tier, category, shown=shown)
            self._raise("entered_tokens_total", of.entered, tier, category, shown=shown)
            self._raise("demoted_tokens_total", of.demoted, tier, category, shown=shown)
            for reason, tokens in zip(REASONS, of.evicted):
                self._raise("evicted_tokens_total", tokens, tier, category, reason, shown=shown)
            stay = of.residency
            self._spread(stay.tokens, stay.token_seconds, tier, category, shown=shown)

    def _series(self, category: str) -> str:
        """The label of a category's series: its own, or ``OTHER`` after ``MAX_SERIES``."""
        if category not in self._categories:
            if len(self._categories) > MAX_SERIES:
                return OTHER
            self._categories.add(category)
        return category

    def _show_groups(self, groups: Iterable[Mapping[str, Any]]) -> None:
        gone = set(self._groups)
        for group in groups:
            labels, ttl_s = (group["tier"], group["group"]), group["ttl_s"]
            self._set("group_ttl_seconds", math.inf if ttl_s is None else ttl_s, *labels)
            self._groups.add(labels)
            gone.discard(labels)
        for labels in gone:  # of an older table: a series of this kind cannot be taken back
            self._set("group_ttl_seconds", math.nan, *labels)
            self._groups.discard(labels)

    def _show_disk(self, disk: Mapping[str, Any] | None, page_tokens: int) -> None:
        if disk is None:
            return
        for reason, pages in disk["evicted_pages"].items():
            self._raise("evicted_tokens_total", pages * page_tokens, "disk", "all", reason)
        tokens = [pages * page_tokens for pages in disk["residency_pages"]]
        self._spread(tokens, disk["residency_page_seconds"] * page_tokens, "disk", "all")
        self._raise("entered_tokens_total", disk["written_pages"] * page_tokens, "disk", "all")
        self._raise("disk_read_bytes_total", disk["read_bytes"])
        self._raise("disk_written_bytes_total", disk["written_bytes"])
        for kind, times in disk["faults"].items():
            self._raise("disk_faults_total", times, kind)

    def _child(self, name: str, labels: tuple[str, ...]) -> Any:
        child = self._children.get((name, labels))
        if child is None:
            family = self._families[name]
            child = family.labels(*self._fixed.values(), *labels)
            self._children[name, labels] = child
        return child

    def _set(self, name: str, value: float, *labels: str) -> None:
        if self._shown.get((name, labels)) != value:
            self._child(name, labels).set(value)
            self._shown[name, labels] = value

    def _raise(self, name: str, total: float, *labels: str, shown: _Shown | None = None) -> None:
        """Raise a counter by what ``total`` is above ``shown``. Series appear when they count."""
        shown = self._shown if shown is None else shown
        more = total - shown.get((name, labels), 0)
        if more > 0:
            self._child(name, labels).inc(more)
            shown[name, labels] = total

    def _spread(
        self, bins: list[int], total: float, *labels: str, shown: _Shown | None = None
    ) -> None:
        """Raise the residency histogram by what ``bins`` and their sum are above ``shown``."""
        name = "residency_seconds"
        shown = self._shown if shown is None else shown
        before, total_before = shown.get((name, labels), ([0] * len(bins), 0.0))
        if bins == before:
            return
        # NOTE: the client's histogram takes one observation at a time. Its bins, which hold one
        # value each and are summed up when they are read, are what it would add to.
        child = self._child(name, labels)
        for value, tokens, old in zip(child._buckets, bins, before):
            value.inc(tokens - old)
        child._sum.inc(total - total_before)
        shown[name, labels] = (list(bins), total)


def _family(client: Any, metric: Metric, fixed: Mapping[str, str]) -> Any:
    labels = (*fixed, *metric.labels)
    name = PREFIX + metric.name
    if metric.kind == "counter":
        return client.Counter(name, metric.meaning, labels)
    if metric.kind == "histogram":
        return client.Histogram(name, metric.meaning, labels, buckets=EDGES_S)
    return client.Gauge(name, metric.meaning, labels, multiprocess_mode="mostrecent")
