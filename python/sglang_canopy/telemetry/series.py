"""All series that Canopy adds to ``/metrics``, for Prometheus and for the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Metric:
    """A series, as documented in ``docs/reference/metrics.md`` and exported to Prometheus."""

    name: str
    """Name without the prefix ``canopy:``; a counter's ends in ``_total``."""
    kind: str
    """``counter`` or ``gauge``."""
    labels: tuple[str, ...]
    """Labels in addition to ``RANK_LABEL`` and the operator's (``--extra-metric-labels``)."""
    meaning: str
    path: str = ""
    """Path of its values in a status; empty if code computes them. Keys joined by dots. ``{label}``
    stands for every key, which becomes the label; ``rows[a,b]`` for every row of a list, whose
    fields ``a`` and ``b`` become labels."""

    def values(self, status: Mapping[str, Any]) -> Iterator[tuple[float, tuple[str, ...]]]:
        """Yield each value in ``status`` with its labels; none for a part that is missing or null."""
        for value, labels in _walk_path(status, self.path.split(".") if self.path else (), {}):
            yield float(value), tuple(labels[name] for name in self.labels)


def status_metric(name: str, path: str, meaning: str) -> Metric:
    """Return a series of values in a status, with the labels of its ``path``."""
    kind = "counter" if name.endswith("_total") else "gauge"
    labels = re.findall(r"[\[{]([\w,]+)[\]}]", path)
    return Metric(name, kind, tuple(",".join(labels).split(",")) if labels else (), meaning, path)


def _walk_path(
    status: Any, steps: Sequence[str], labels: dict[str, str]
) -> Iterator[tuple[float, dict[str, str]]]:
    if status is None or (not steps and isinstance(status, (Mapping, list))):
        return
    if not steps:
        yield status, labels
        return
    step, *further_steps = steps
    if step.startswith("{"):
        for key, value in status.items():
            yield from _walk_path(value, further_steps, {**labels, step[1:-1]: str(key)})
        return
    name, _, fields = step.rstrip("]").partition("[")
    value = status.get(name)
    if not fields:
        yield from _walk_path(value, further_steps, labels)
        return
    for row in value or ():
        row_labels = {field: _label_text(row[field]) for field in fields.split(",")}
        yield from _walk_path(row, further_steps, {**labels, **row_labels})


def _label_text(value: Any) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


PREFIX = "canopy:"
RANK_LABEL = "dp_rank"

CACHE_METRICS = (
    Metric(
        "requests_total", "counter", ("category",), "finished requests; one with n > 1 counts once"
    ),
    status_metric(
        "refused_requests_total",
        "refused_requests.{reason}",
        "requests that ended without admission, not in any other count: `invalid` (too long, or an "
        "unsupported field), `queue` (SGLang's queue was full, or the wait too long), "
        "`given_up` (the client disconnected)",
    ),
    Metric("prompt_tokens_total", "counter", ("category",), "prompt tokens of these requests"),
    Metric("hit_tokens_total", "counter", ("tier", "category"), "prompt tokens found in the tier"),
    Metric("miss_tokens_total", "counter", ("category",), "prompt tokens found in no tier"),
    status_metric(
        "missed_tokens_total",
        "missed.tokens.{cause}.{tier}",
        "the same tokens by cause and tier (docs/guide/metrics.md): `never_seen`, `evicted`, `not_written`, "
        "`late`, `in_flight`, `flushed`, `partial_page`, `unknown`",
    ),
    Metric(
        "entered_tokens_total",
        "counter",
        ("tier", "category"),
        "tokens that entered the tier: computed, demoted or loaded",
    ),
    Metric(
        "evicted_tokens_total",
        "counter",
        ("tier", "category", "reason"),
        "tokens evicted from the tier, by reason",
    ),
    Metric(
        "demoted_tokens_total",
        "counter",
        ("tier", "category"),
        "evicted tokens of the device that the host still has",
    ),
    status_metric(
        "capacity_bytes", "tiers.{tier}.capacity_bytes", "capacity of the tier, on this rank"
    ),
    status_metric(
        "used_bytes", "tiers.{tier}.used_bytes", "bytes of the tier in use, on this rank"
    ),
    Metric(
        "held_tokens",
        "gauge",
        ("tier", "category"),
        "cached tokens by the category of their last user; counted every 5 s or less often",
    ),
    status_metric(
        "kv_bytes_per_token", "kv_bytes_per_token", "bytes of one token's KV, on this rank"
    ),
    status_metric("tree_nodes", "nodes", "nodes of the radix tree"),
    Metric(
        "group_ttl_seconds",
        "gauge",
        ("tier", "group"),
        "TTL of a subtree group, by its index in the table (`residual`: all other prefixes); "
        "`+Inf` never expires, `NaN` is a group of an older table",
    ),
    status_metric("disk_read_bytes_total", "disk.read_bytes", "bytes read from the disk store"),
    status_metric(
        "disk_written_bytes_total", "disk.written_bytes", "bytes written to the disk store"
    ),
    status_metric(
        "disk_faults_total",
        "disk.faults.{kind}",
        "faults of the disk tier that were answered by recomputation",
    ),
    status_metric(
        "files_set_aside_total",
        "files_set_aside.{file}",
        "files of learnt state that were damaged or of another version, kept as `.bad`",
    ),
    status_metric(
        "tenants_at_limit",
        "limits.{limit}.tenants",
        "tenants that use 95 % of a limit: of their disk quota (`quota`), of kept paths (`keep`)",
    ),
    status_metric(
        "limit_refusals_total",
        "limits.{limit}.refused",
        "pages refused by the disk (`quota`), and refused keeps, because a limit of one tenant or of "
        "all tenants was reached",
    ),
    status_metric(
        "hint_tenants",
        "hints[hint,source,applied].tenants",
        "tenants that hinted when a conversation continues (`return`) or that it is over (`over`), by "
        "source, and whether such hints were right often enough to be applied (`yes`, `no`); of the 64 "
        "senders that hinted last",
    ),
    status_metric(
        "queue_admitted_total",
        "queue.admitted.{by}",
        "requests admitted, as the shortest in the queue or on an older request's budget",
    ),
    status_metric(
        "rank_disagreements_total",
        "agreement.records_disagreed",
        "disk reads whose metadata differed between tensor-parallel ranks; the first rank's counts",
    ),
    status_metric("gate_active", "session_gate.active", "1 while the session gate is active"),
    status_metric(
        "gate_thrash_share",
        "session_gate.thrash_share",
        "share of recent prefill (one pool's worth) that recomputed evicted KV of a live session",
    ),
    status_metric(
        "gate_waiting_sessions", "session_gate.waiting_sessions", "sessions that the gate holds"
    ),
    status_metric(
        "gate_active_sessions",
        "session_gate.active_sessions",
        "sessions admitted and not forgotten",
    ),
    status_metric(
        "gate_paused_sessions",
        "session_gate.paused_sessions",
        "sessions that must wait when they return",
    ),
    status_metric(
        "gate_footprint_tokens",
        "session_gate.footprint_tokens",
        "expected KV of the active sessions, in tokens",
    ),
    status_metric(
        "gate_capacity_tokens",
        "session_gate.capacity_tokens",
        "tokens that device and host can hold",
    ),
    status_metric(
        "gate_admitted_sessions_total", "session_gate.admitted_sessions", "sessions admitted"
    ),
    status_metric(
        "gate_delayed_sessions_total",
        "session_gate.delayed_sessions",
        "admitted sessions that had to wait",
    ),
    status_metric("gate_wait_seconds_total", "session_gate.wait_seconds", "sum of their waits"),
    status_metric(
        "gate_pauses_total", "session_gate.pauses", "active sessions paused until the others fit"
    ),
    status_metric(
        "gate_forgotten_sessions_total",
        "session_gate.forgotten_sessions",
        "sessions presumed over, after a silence or for lack of room",
    ),
    Metric(
        "whatif_hit_ratio",
        "gauge",
        ("policy", "capacity"),
        "share of prompt tokens that a policy would hit at a capacity; `NaN` once the meter has "
        "dropped it",
    ),
    Metric(
        "whatif_decided", "gauge", (), "1 if the meter has seen enough for its estimates, else 0"
    ),
    status_metric(
        "whatif_behind",
        "whatif.floor.behind",
        "1 while `canopy-lru` ranks because the policy fell behind it, else 0",
    ),
    status_metric(
        "whatif_sampled_requests_total", "whatif.sampled_requests", "requests in the meter's sample"
    ),
    status_metric(
        "whatif_seconds_total", "whatif.spent_s", "CPU time of the meter, scheduler's thread"
    ),
    status_metric(
        "reporting_seconds_total", "reporting_s", "CPU time of the thread that updates these series"
    ),
)

IGNORED_METRICS = (
    status_metric(
        "ignored_fields_total",
        "ignored_fields.{field}",
        "wrong fields of requests, which are ignored, by key of `custom_params`, `kv_hints` or `other`",
    ),
)
"""Series of an HTTP process."""
