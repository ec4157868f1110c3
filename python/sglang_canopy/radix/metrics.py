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

from sglang_canopy.radix.counters import EDGES_S, REASONS, TIERS, Counters


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
        self._shown: dict[tuple[str, tuple[str, ...]], float] = {}
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
            for tier, tokens in row["held_tokens"].items():
                if tier in status["tiers"]:
                    self._set("held_tokens", tokens, tier, row["category"])
        self._set("kv_bytes_per_token", status["kv_bytes_per_token"])
        self._set("tree_nodes", status["nodes"])
        self._show_groups(status["groups"])
        self._show_disk(status.get("disk"), status["page_tokens"])
        self._raise("reporting_seconds_total", status["reporting_s"])

    def _show_rows(self, counters: Counters, tiers: Iterable[str]) -> None:
        for row in counters.rows():
            category = row.category
            self._raise("requests_total", row.requests, category)
            self._raise("prompt_tokens_total", row.prompt_tokens, category)
            self._raise("miss_tokens_total", row.misses, category)
            for tier, of in zip(TIERS, row.tiers):
                if tier not in tiers:
                    continue
                self._raise("hit_tokens_total", of.hits, tier, category)
                self._raise("entered_tokens_total", of.entered, tier, category)
                self._raise("demoted_tokens_total", of.demoted, tier, category)
                for reason, tokens in zip(REASONS, of.evicted):
                    self._raise("evicted_tokens_total", tokens, tier, category, reason)
                self._spread(of.residency.tokens, of.residency.token_seconds, tier, category)

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

    def _raise(self, name: str, total: float, *labels: str) -> None:
        """Raise a counter to ``total``. Series appear with their first count."""
        more = total - self._shown.get((name, labels), 0)
        if more > 0:
            self._child(name, labels).inc(more)
            self._shown[name, labels] = total

    def _spread(self, bins: list[int], total: float, *labels: str) -> None:
        """Bring the residency histogram to ``bins`` and its sum to ``total``."""
        name = "residency_seconds"
        if sum(bins) == self._shown.get((name, labels), 0):
            return
        # NOTE: the client's histogram takes one observation at a time. Its bins, which hold one
        # value each and are summed up when they are read, are what it would add to.
        child = self._child(name, labels)
        for value, tokens in zip(child._buckets, bins):
            value.inc(tokens - value.get())
        child._sum.inc(total - child._sum.get())
        self._shown[name, labels] = sum(bins)


def _family(client: Any, metric: Metric, fixed: Mapping[str, str]) -> Any:
    labels = (*fixed, *metric.labels)
    name = PREFIX + metric.name
    if metric.kind == "counter":
        return client.Counter(name, metric.meaning, labels)
    if metric.kind == "histogram":
        return client.Histogram(name, metric.meaning, labels, buckets=EDGES_S)
    return client.Gauge(name, metric.meaning, labels, multiprocess_mode="mostrecent")
