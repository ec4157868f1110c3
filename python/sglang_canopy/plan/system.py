"""Convert a configuration for the simulator, and the simulator's result to a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_canopy.plan.prices import GIB, Prices
from sglang_canopy.plan.space import GROUP, Configuration
from sglang_canopy.sim.system.config import SystemConfig, TierSpec
from sglang_canopy.sim.system.engine_profile import EngineProfile
from sglang_canopy.sim.system.result import SystemResult
from sglang_canopy.ttl.table import TTLTable

HOST_BYTES_PER_S = 20e9
"""Between host memory and device, where the profile has no figure: about PCIe 4.0 x16, in use."""

_KEPT = (
    "requests", "mean_ttft_s", "p50_ttft_s", "p90_ttft_s", "p99_ttft_s", "mean_tpot_s",
    "mean_e2e_s", "throughput_tokens_per_s", "output_tokens_per_s", "makespan_s",
    "token_hit_ratio", "token_hit_ratio_by_tier", "mean_bytes_by_tier", "peak_bytes_by_tier",
    "disk_read_bytes", "disk_written_bytes", "mean_queue_s", "busy_share", "retracted", "seconds",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Engine:
    """What does not vary within a plan: the model, the device's room and the routing."""

    profile: EngineProfile
    device_tokens: int
    """KV pool of one instance on its device."""
    routing: str = "round-robin"
    max_running: int = 256


def system_of(
    configuration: Configuration,
    engine: Engine,
    prices: Prices,
    policy_configs: Mapping[str, Mapping[str, Any]],
    group_table: TTLTable | None = None,
) -> SystemConfig:
    """The simulator's configuration. ``group_table`` is for ``ttl="group"``."""
    c, profile = configuration, engine.profile
    speed = profile.host
    host = disk = None
    if c.dram_gib > 0:
        host = TierSpec(
            c.dram_gib * GIB,
            speed.read_bytes_per_s if speed else HOST_BYTES_PER_S,
            speed.write_bytes_per_s if speed else HOST_BYTES_PER_S,
            policy=c.host_policy,
            policy_config=policy_configs.get(c.host_policy, {}),
            latency_s=speed.latency_s if speed else 0.0,
        )
    if c.disk is not None:
        sold = prices.disk(c.disk)
        disk = TierSpec(
            c.disk_gib * GIB,
            sold.read_bytes_per_s(c.disk_gib),
            sold.write_bytes_per_s(c.disk_gib),
            shared_channel=sold.shared_channel,
            policy=c.disk_policy,
            policy_config=policy_configs.get(c.disk_policy, {}),
            ttl=group_table if c.ttl == GROUP else c.ttl,
            latency_s=sold.latency_s,
        )
    return SystemConfig(
        device_tokens=engine.device_tokens,
        instances=c.instances,
        routing=engine.routing,
        device_policy=c.device_policy,
        device_policy_config=policy_configs.get(c.device_policy, {}),
        host=host,
        disk=disk,
        max_running=engine.max_running,
    )


def metrics_of(result: SystemResult) -> dict[str, Any]:
    """What is kept of a simulation."""
    full = result.to_json()
    return {name: full[name] for name in _KEPT}


def row_of(
    configuration: Configuration, metrics: Mapping[str, Any], prices: Prices
) -> dict[str, Any]:
    """Decision variables, metrics and cost (equations 1 and 2) of one configuration."""
    c = configuration
    used = metrics["mean_bytes_by_tier"].get("disk", 0.0) / GIB
    per_hour = prices.per_hour(
        instances=c.instances, dram_gib=c.dram_gib, disk=c.disk, disk_gib=c.disk_gib, used_gib=used
    )
    return {
        **c.to_json(),
        **metrics,
        "cost_per_hour": per_hour,
        "cost": per_hour * metrics["makespan_s"] / 3600,
    }


def least_cost(configuration: Configuration, rows: Any, prices: Prices) -> dict[str, float]:
    """Lower bounds of a configuration's cost before it is simulated.

    ``rows`` are its evaluated neighbours: it is served no sooner than the quicker of them.
    """
    c = configuration
    per_hour = prices.per_hour(
        instances=c.instances, dram_gib=c.dram_gib, disk=c.disk, disk_gib=c.disk_gib, used_gib=0.0
    )
    makespan_s = min(row["makespan_s"] for row in rows)
    return {"cost_per_hour": per_hour, "cost": per_hour * makespan_s / 3600}
