"""Golden rows of simulated servers under load: TTFT by queue order, gate, tiers and write policy."""

from __future__ import annotations

from functools import cache
from typing import Any

from paths import digest
from real_traces import first_requests

from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.system import SystemConfig, TierSpec, Workload, load_profile
from canopy_lab.sim.system.loads import LoadedSystem, LoadRun

PROFILE = "qwen2.5-7b-h100"
DEVICE_TOKENS = {"conversation": 500_000, "agentic": 1_000_000}
"""Workload -> tokens of the device's pool."""
REQUEST_COUNTS = {"conversation": 2000, "agentic": 1200}
ARRIVAL_LOOPS = {"conversation": "turns-wait", "agentic": "closed"}
ARRIVAL_RATES = {"conversation": 1.3, "agentic": 100.0}
"""Requests a second of ``conversation``; sessions an hour of ``agentic``."""
HOST_RATIO, DISK_RATIO = 2.0, 6.0
"""Sizes of the lower tiers as multiples of the device's pool."""
DISK_BYTES_PER_S = 3e9

ARMS: dict[str, dict[str, Any]] = {
    "fcfs": {},
    "fcfs, wa": {"device_policy": "wa"},
    "fcfs, as SGLang": {"whole_nodes": True, "touches_waiting": True},
    "hrrn": {"schedule_policy": "hrrn"},
    "hrrn, wa": {"schedule_policy": "hrrn", "device_policy": "wa"},
    "lpm": {"schedule_policy": "lpm"},
    "the gate": {"session_gate": "footprint"},
    "the gate, wa": {"session_gate": "footprint", "device_policy": "wa"},
    "host, write_through": {"tiers": 1, "write_policy": "write_through"},
    "host, write_through, wa": {"tiers": 1, "write_policy": "write_through", "device_policy": "wa"},
    "host, write_back": {"tiers": 1, "write_policy": "write_back"},
    "host, write_back, wa": {"tiers": 1, "write_policy": "write_back", "device_policy": "wa"},
    "host and disk, write_through": {"tiers": 2, "write_policy": "write_through"},
    "host and disk, write_through, wa": {"tiers": 2, "write_policy": "write_through", "device_policy": "wa"},
    "host and disk, write_back": {"tiers": 2, "write_policy": "write_back"},
    "host and disk, TTL of 60 s": {"tiers": 2, "ttl_s": 60.0},
}  # fmt: skip
"""Arm -> settings of ``SystemConfig``; ``tiers``: how many lie below the device; ``ttl_s``: of the disk."""

SystemTask = tuple[str, str]
"""A workload and an arm."""


def tasks() -> list[SystemTask]:
    """Return the independent tasks, one for each row."""
    return [(workload, arm) for workload in DEVICE_TOKENS for arm in ARMS]


def rows(task: SystemTask) -> dict[str, Any]:
    """Return the task's row."""
    workload, arm = task
    settings = dict(ARMS[arm])
    profile = load_profile(PROFILE)
    lower_tier_count, ttl_s = settings.pop("tiers", 0), settings.pop("ttl_s", None)
    pool_bytes = DEVICE_TOKENS[workload] * profile.kv_bytes_per_token
    policy = settings.get("device_policy", "lru")
    if lower_tier_count >= 1:
        host = profile.host
        settings["host"] = TierSpec(
            HOST_RATIO * pool_bytes, host.read_bytes_per_s, host.write_bytes_per_s, policy=policy
        )
    if lower_tier_count >= 2:
        settings["disk"] = TierSpec(
            DISK_RATIO * pool_bytes, DISK_BYTES_PER_S, DISK_BYTES_PER_S, policy=policy, ttl=ttl_s
        )
    config = SystemConfig(device_tokens=DEVICE_TOKENS[workload], fixed_outputs=True, **settings)
    system = LoadedSystem(make_workload(workload), config, profile, loop=ARRIVAL_LOOPS[workload])
    return {f"{workload}, {arm}": stored_figures(system.run_at(ARRIVAL_RATES[workload]))}


@cache
def make_workload(workload: str) -> Workload:
    """Return a workload's requests as the simulator receives them."""
    return Workload(CompactTrace(first_requests(workload, REQUEST_COUNTS[workload])), seed=0)


def stored_figures(run: LoadRun) -> dict[str, Any]:
    """Return TTFT in seconds, hits, and a digest of every request's TTFT."""
    return {
        "ttft_mean_s": run.latency.ttft_s.mean,
        "ttft_p50_s": run.latency.ttft_s.p50,
        "ttft_p99_s": run.latency.ttft_s.p99,
        "session_p99_s": run.latency.session_s.p99,
        "sessions_per_hour": run.latency.sessions_per_hour,
        "token_hit_ratio": run.system.token_hit_ratio,
        "prefill_s_saved": run.system.prefill_s_saved_by_tier,
        "each_request": digest(run.system.ttft_s.tolist()),
    }
