"""Simulate a whole system over a trace."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.sim.requests import to_requests
from sglang_canopy.sim.system.config import SystemConfig
from sglang_canopy.sim.system.events import EventLog
from sglang_canopy.sim.system.profile import EngineProfile
from sglang_canopy.sim.system.result import SystemResult
from sglang_canopy.sim.tree import RadixTree
from sglang_canopy.trace.record import TraceRequest


def simulate_system(
    trace: Iterable[TraceRequest],
    config: SystemConfig,
    profile: EngineProfile,
    *,
    seed: int = 0,
    events: EventLog | None = None,
) -> SystemResult:
    """First version: one request after another on each instance, tiers as one cache."""
    started = time.perf_counter()
    trees: list[RadixTree] = []
    free: list[float] = []
    ttft, e2e, cached, tokens, hits, out = [], [], [], 0, 0, 0
    first = last = 0.0
    for index, request in enumerate(to_requests(trace)):
        if not trees:
            first = request.time
            lower = config.host.capacity_bytes if config.host else 0
            disk = config.disk.capacity_bytes if config.disk else 0
            room = config.device_tokens + (lower + disk) / profile.kv_bytes_per_token
            blocks = max(1, int(room // request.block_tokens))
            for _ in range(config.instances):
                policy = make_policy(config.device_policy, config.device_policy_config)
                trees.append(RadixTree(policy, blocks, request.block_tokens))
                free.append(0.0)
        at = index % config.instances
        hit = min(trees[at].access(request) * request.block_tokens, request.prompt_tokens - 1)
        begin = max(free[at], request.time)
        first_token = begin + profile.prefill_s(request.prompt_tokens - hit, hit)
        done = first_token + request.output_tokens * profile.decode_s(1, request.prompt_tokens)
        free[at] = first_token + (done - first_token) / 8
        ttft.append(first_token - request.time)
        e2e.append(done - request.time)
        cached.append(hit)
        tokens += request.prompt_tokens
        out += request.output_tokens
        hits += hit
        last = max(last, done)
    if not trees:
        raise CanopyError("the trace has no requests; give one that has")
    waits = np.array(ttft)
    p50, p90, p99 = (float(p) for p in np.percentile(waits, (50, 90, 99)))
    span = max(last - first, 1e-9)
    none = {"device": 0.0, "host": 0.0, "disk": 0.0}
    return SystemResult(
        requests=len(ttft),
        mean_ttft_s=float(waits.mean()),
        p50_ttft_s=p50,
        p90_ttft_s=p90,
        p99_ttft_s=p99,
        mean_tpot_s=profile.decode_s(1, 1024),
        mean_e2e_s=float(np.mean(e2e)),
        throughput_tokens_per_s=(tokens + out) / span,
        output_tokens_per_s=out / span,
        makespan_s=span,
        token_hit_ratio=hits / tokens,
        token_hit_ratio_by_tier={**none, "device": hits / tokens},
        mean_bytes_by_tier=none,
        peak_bytes_by_tier=none,
        host_read_bytes=0.0,
        host_written_bytes=0.0,
        disk_read_bytes=0.0,
        disk_written_bytes=0.0,
        prefetch_late_bytes=0.0,
        mean_queue_s=0.0,
        mean_queue_length=0.0,
        peak_queue_length=0,
        busy_share=0.0,
        retracted=0,
        events=len(ttft),
        seconds=time.perf_counter() - started,
        ttft_s=waits,
        e2e_s=np.array(e2e),
        cached_tokens=np.array(cached),
    )
