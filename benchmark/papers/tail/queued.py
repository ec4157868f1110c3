"""TTFT in milliseconds with requests that wait for each other: ``simulate_system``."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from canopy_lab.sim.system import SystemConfig, Workload, load_profile, simulate_system
from canopy_lab.trace.record import TraceRequest
from tail.runs import Workbench

PROFILE = "llama-3.1-8b-h100"
WAITING = {"waiting_prefixes": "awaited"}
"""Setting of the results: ``--canopy-protect-waiting off``."""
LOADS = (0.6, 0.8, 0.95)
"""Shares of an engine's capacity under ``lru``."""


def at_pace(trace: list[TraceRequest], stretch: float) -> list[TraceRequest]:
    """Return the requests ``stretch`` times as far apart. Requests with equal time stamps (Mooncake stamps
    every 3 s) are spread evenly up to the next stamp."""
    groups = [list(rows) for _, rows in groupby(trace, key=lambda r: r.time_s)]
    starts = [rows[0].time_s for rows in groups]
    ends = [*starts[1:], starts[-1] + 3.0]
    return [
        replace(r, time_s=stretch * (start + (end - start) * i / len(rows)))
        for rows, start, end in zip(groups, starts, ends, strict=True)
        for i, r in enumerate(rows)
    ]


def arms(threshold: float, growth: float) -> dict[str, dict[str, Any]]:
    """Options of ``SystemConfig`` by name; SGLang's own policies evict whole nodes."""
    own = {"threshold_tokens": threshold, "next_prompt_tokens": growth}
    aim = {"threshold_tokens": threshold}
    return {
        "SGLang's lru": {"device_policy": "lru", "whole_nodes": True},
        "SGLang's tlru": {
            "device_policy": "sglang-tlru",
            "device_policy_config": own,
            "whole_nodes": True,
        },
        "lru": {"device_policy": "lru"},
        "canopy-tlru": {"device_policy": "canopy-tlru", "device_policy_config": aim},
        "etlru": {"device_policy": "etlru", "device_policy_config": aim},
        "wa": {"device_policy": "wa"},
    }


def queued(bench: Workbench, capacity: float, threshold: float) -> list[dict[str, Any]]:
    """TTFT quantiles by load and policy."""
    profile = load_profile(PROFILE)
    tokens = int(capacity * bench.distinct * bench.trace[0].block_tokens)
    full = simulate_system(
        Workload(at_pace(bench.trace, 1e-3)), SystemConfig(device_tokens=tokens, **WAITING), profile
    )
    span = bench.trace[-1].time_s - bench.trace[0].time_s
    rows = []
    for load in LOADS:
        stretch = full.makespan_s / (load * span)
        workload = Workload(at_pace(bench.trace, stretch))
        for name, options in arms(threshold, bench.growth).items():
            result = simulate_system(
                workload, SystemConfig(device_tokens=tokens, **WAITING, **options), profile
            )
            p50, p90, p95, p99 = np.percentile(result.ttft_s, (50, 90, 95, 99))
            rows.append(
                {
                    "load": load,
                    "arm": name,
                    "hit_pct": round(100 * result.token_hit_ratio, 2),
                    "mean_s": round(result.mean_ttft_s, 2),
                    "p50_s": round(float(p50), 2),
                    "p90_s": round(float(p90), 2),
                    "p95_s": round(float(p95), 2),
                    "p99_s": round(float(p99), 2),
                    "queue_s": round(result.mean_queue_s, 2),
                }
            )
    return rows
