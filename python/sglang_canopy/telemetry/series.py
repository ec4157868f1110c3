"""All series that Canopy adds to ``/metrics``: name, kind, labels, meaning."""

from __future__ import annotations

from sglang_canopy.telemetry import (
    adapter_series,
    limit_series,
    prefill_seconds,
    queue_series,
)
from sglang_canopy.telemetry.metric import Metric

PREFIX = "canopy:"
RANK_LABEL = "dp_rank"

CACHE = (
    Metric(
        "requests_total",
        "counter",
        ("category",),
        "finished requests; one with n > 1 counts once",
    ),
    Metric(
        "refused_requests_total",
        "counter",
        ("reason",),
        "requests that ended without admission, not in any other count: `invalid` (too long, or an "
        "unsupported field), `queue` (SGLang's queue was full, or the wait too long), "
        "`given_up` (the client disconnected)",
    ),
    Metric("prompt_tokens_total", "counter", ("category",), "prompt tokens of these requests"),
    Metric(
        "hit_tokens_total",
        "counter",
        ("tier", "category"),
        "prompt tokens found in the tier",
    ),
    Metric("miss_tokens_total", "counter", ("category",), "prompt tokens found in no tier"),
    Metric(
        "missed_tokens_total",
        "counter",
        ("cause", "tier"),
        "the same tokens by cause: `never_seen`; `evicted` from `tier`, the last that held them; "
        "`not_written` to `tier` before they left the tier above; `late`: `tier` held them and did not "
        "deliver; `in_flight`: a running request computed them; `flushed`; `partial_page`; `unknown`",
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
    Metric(
        "residency_seconds",
        "histogram",
        ("tier", "category"),
        "time in the tier before eviction; a token counts once",
    ),
    Metric("capacity_bytes", "gauge", ("tier",), "capacity of the tier, on this rank"),
    Metric("used_bytes", "gauge", ("tier",), "bytes of the tier in use, on this rank"),
    Metric(
        "held_tokens",
        "gauge",
        ("tier", "category"),
        "cached tokens by the category of their last user; counted every 5 s or less often",
    ),
    Metric("kv_bytes_per_token", "gauge", (), "bytes of one token's KV, on this rank"),
    Metric("tree_nodes", "gauge", (), "nodes of the radix tree"),
    Metric(
        "scheduler_seconds_total",
        "counter",
        ("seam",),
        "CPU time of the scheduler's thread in Canopy's hooks, by hooked function of SGLang, without "
        "that function's own time; one call in 17 is timed. `radix.NAME`: whole calls of the tree, for "
        "which SGLang's own tree would take time too",
    ),
    Metric(
        "scheduler_longest_seconds",
        "gauge",
        ("seam",),
        "the longest timed call of these",
    ),
    Metric(
        "group_ttl_seconds",
        "gauge",
        ("tier", "group"),
        "TTL of a subtree group, by its index in the table (`residual`: all other prefixes); "
        "`+Inf` never expires, `NaN` is a group of an older table",
    ),
    Metric("disk_read_bytes_total", "counter", (), "bytes read from the disk store"),
    Metric(
        "disk_written_bytes_total",
        "counter",
        (),
        "bytes written to the disk store",
    ),
    Metric(
        "disk_faults_total",
        "counter",
        ("kind",),
        "faults of the disk tier that were answered by recomputation",
    ),
    Metric(
        "files_set_aside_total",
        "counter",
        ("file",),
        "files of learnt state that were damaged or of another version, kept as `.bad`",
    ),
    *adapter_series.METRICS,
    *limit_series.METRICS,
    *queue_series.METRICS,
    *prefill_seconds.METRICS,
    Metric(
        "rank_disagreements_total",
        "counter",
        (),
        "disk reads whose metadata differed between tensor-parallel ranks; the first rank's counts",
    ),
    Metric("gate_armed", "gauge", (), "1 while the session gate is armed"),
    Metric(
        "gate_thrash_share",
        "gauge",
        (),
        "share of recent prefill (one pool's worth) that recomputed evicted KV of a live session",
    ),
    Metric(
        "gate_waiting_sessions",
        "gauge",
        (),
        "sessions that the gate holds",
    ),
    Metric("gate_active_sessions", "gauge", (), "sessions admitted and not forgotten"),
    Metric("gate_paused_sessions", "gauge", (), "sessions that must wait when they return"),
    Metric("gate_footprint_tokens", "gauge", (), "expected KV of the active sessions, in tokens"),
    Metric("gate_capacity_tokens", "gauge", (), "tokens that device and host can hold"),
    Metric("gate_admitted_sessions_total", "counter", (), "sessions admitted"),
    Metric("gate_delayed_sessions_total", "counter", (), "admitted sessions that had to wait"),
    Metric("gate_wait_seconds_total", "counter", (), "sum of their waits"),
    Metric(
        "gate_pauses_total",
        "counter",
        (),
        "active sessions paused until the others fit",
    ),
    Metric(
        "gate_forgotten_sessions_total",
        "counter",
        (),
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
        "whatif_saved_share",
        "gauge",
        ("policy", "capacity"),
        "the same share of the prompts' prefill seconds; of their tokens until they are measured",
    ),
    Metric(
        "whatif_decided", "gauge", (), "1 if the meter has seen enough for its estimates, else 0"
    ),
    Metric(
        "whatif_behind",
        "gauge",
        (),
        "1 while `canopy-lru` ranks because the policy fell behind it, else 0",
    ),
    Metric("whatif_sampled_requests_total", "counter", (), "requests in the meter's sample"),
    Metric("whatif_seconds_total", "counter", (), "CPU time of the meter, scheduler's thread"),
    Metric(
        "reporting_seconds_total",
        "counter",
        (),
        "CPU time of the thread that updates these series",
    ),
)
"""Series of a cache."""
