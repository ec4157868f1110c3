"""Convert a configuration for the simulator, and the simulator's result to a row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from canopy_lab.plan.disk_class import GIB
from canopy_lab.plan.objective import PlanRow
from canopy_lab.plan.prices import Prices
from canopy_lab.plan.space import GROUP, KNOBS, Configuration
from canopy_lab.sim.system.config import SystemConfig, TierSpec
from canopy_lab.sim.system.engine_profile import EngineProfile
from canopy_lab.sim.system.result import SystemResult
from sglang_canopy.config.queue import BOUNDED_SHORTEST
from sglang_canopy.config.server_settings import SGLANG_DEFAULTS, ServerSettings
from sglang_canopy.errors import CanopyError
from sglang_canopy.ttl.table import TTLTable

PEAK_FACTOR = 4.0
"""Capacity relative to the mean content, if TTLs bound the mean."""
HOST_BYTES_PER_S = 20e9
"""Default host-device bandwidth: about PCIe 4.0 x16 in practice."""

_ROW_METRICS = (
    "requests", "mean_ttft_s", "p50_ttft_s", "p90_ttft_s", "p99_ttft_s", "mean_tpot_s",
    "mean_e2e_s", "throughput_tokens_per_s", "output_tokens_per_s", "makespan_s",
    "token_hit_ratio", "token_hit_ratio_by_tier", "mean_bytes_by_tier", "peak_bytes_by_tier",
    "disk_read_bytes", "disk_written_bytes", "mean_queue_s", "busy_share", "retracted", "seconds",
    "prefill_s_saved_by_tier",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Engine:
    """Constants of a plan: model, device pool, routing, and SGLang's fixed settings."""

    profile: EngineProfile
    device_tokens: int
    """KV pool of one instance on its device."""
    routing: str = "round-robin"
    settings: ServerSettings = SGLANG_DEFAULTS
    is_pool_known: bool = True
    """Whether ``device_tokens`` was given or measured; else it was assumed."""
    is_auto: bool = False
    """Whether the servers run ``--radix-eviction auto``, which also orders the queue."""

    def settings_of(self, point: Configuration) -> ServerSettings:
        """Return all SGLang settings of a server with this configuration.

        Raises ``CanopyError`` if the chunk size is no multiple of the page size, which SGLang
        requires.
        """
        if point.chunked_prefill_size % point.page_size:
            raise CanopyError(
                f"chunked_prefill_size {point.chunked_prefill_size} must be a multiple of page_size "
                f"{point.page_size}, as SGLang asks; give another --server chunked_prefill_size=N"
            )
        pool = self.device_tokens if self.is_pool_known else None
        knobs = {knob.setting: getattr(point, knob.name) for knob in KNOBS if knob.setting}
        knob_settings = ServerSettings(max_total_tokens=pool, **knobs)
        return knob_settings.fill_from(self.settings).fill_from(SGLANG_DEFAULTS)


def system_of(
    configuration: Configuration,
    engine: Engine,
    prices: Prices,
    policy_configs: Mapping[str, Mapping[str, Any]],
    group_table: TTLTable | None = None,
) -> SystemConfig:
    """Return the simulator's configuration. ``group_table`` is for ``ttl="group"``."""
    point, profile = configuration, engine.profile
    page_bytes = float(point.page_size * profile.kv_bytes_per_token)
    host_bandwidth = profile.host
    host = disk = None
    if point.dram_gib > 0:
        host = TierSpec(
            point.dram_gib * GIB,
            host_bandwidth.read_bytes_per_s if host_bandwidth else HOST_BYTES_PER_S,
            host_bandwidth.write_bytes_per_s if host_bandwidth else HOST_BYTES_PER_S,
            policy=point.policy,
            policy_config=policy_configs.get(point.policy, {}),
            latency_s=host_bandwidth.latency_s if host_bandwidth else 0.0,
        )
    if point.disk is not None:
        disk_class = prices.disk(point.disk)
        disk = TierSpec(
            _capacity_gib(point, prices) * GIB,
            disk_class.read_bytes_per_s(point.disk_gib, point.disk_mib_s, page_bytes),
            disk_class.write_bytes_per_s(point.disk_gib, point.disk_mib_s, page_bytes),
            shared_channel=disk_class.shared_channel,
            policy=point.policy,
            policy_config=policy_configs.get(point.policy, {}),
            ttl=group_table if point.ttl == GROUP else point.ttl,
            latency_s=disk_class.latency_s,
        )
    return SystemConfig(
        device_tokens=engine.device_tokens,
        instances=point.instances,
        routing=engine.routing,
        device_policy=point.policy,
        device_policy_config=policy_configs.get(point.policy, {}),
        host=host,
        disk=disk,
        # A store locks its folder: a disk of several instances must be sold as one store.
        disk_per_instance=point.disk is not None and not prices.disk(point.disk).shared,
        **scheduling_fields(engine.settings_of(point), engine.is_auto),
    )


def scheduling_fields(settings: ServerSettings, is_auto: bool) -> dict[str, Any]:
    """Return the fields of ``SystemConfig`` that a server's settings give.

    ``is_auto`` orders the queue, unless an order of SGLang's is given.
    """
    flags = settings.to_json()
    queue_order = flags["schedule_policy"]
    if is_auto and queue_order == SGLANG_DEFAULTS.schedule_policy:
        queue_order = BOUNDED_SHORTEST
    return {
        "schedule_conservativeness": flags["schedule_conservativeness"],
        "max_running": flags["max_running_requests"],
        "chunked_prefill_tokens": flags["chunked_prefill_size"],
        "max_prefill_tokens": flags["max_prefill_tokens"],
        "page_tokens": flags["page_size"],
        "write_policy": flags["hicache_write_policy"],
        "schedule_policy": queue_order,
        "prefetch_policy": flags["hicache_storage_prefetch_policy"],
        # SGLang fetches at least one page.
        "prefetch_threshold_tokens": max(flags["prefetch_threshold"], flags["page_size"]),
        "prefetch_timeout_base_s": flags["prefetch_timeout_base"],
        "prefetch_timeout_per_ki_token_s": flags["prefetch_timeout_per_ki_token"],
    }


def _capacity_gib(point: Configuration, prices: Prices) -> float:
    """Return the capacity of one disk. If use is billed and TTLs bound the content, ``disk_gib`` is
    the mean content, and the capacity has room for peaks."""
    assert point.disk is not None
    disk_class = prices.disk(point.disk)
    if disk_class.billing == "used" and point.ttl == GROUP:
        peak_gib = max(point.disk_gib * PEAK_FACTOR, disk_class.smallest_gib)
        return min(disk_class.largest_gib, peak_gib)
    return point.disk_gib


def metrics_of(result: SystemResult) -> dict[str, Any]:
    """Return the part of a simulation's result that is cached."""
    fields = result.to_json()
    return {name: fields[name] for name in _ROW_METRICS}


def row_of(
    configuration: Configuration,
    metrics: Mapping[str, Any],
    prices: Prices,
    kv_bytes_per_token: float = math.inf,
) -> PlanRow:
    """Return the metrics and the cost (equations 1 and 2) of one configuration.

    Operations are bought for pages of ``kv_bytes_per_token`` (infinite: operations are no limit).
    """
    point = configuration
    used_gib = metrics["mean_bytes_by_tier"].get("disk", 0.0) / GIB
    hours = metrics["makespan_s"] / 3600
    cost = _price_per_hour(point, prices, kv_bytes_per_token, used_gib) * hours
    if point.disk is not None:
        cost += prices.disk(point.disk).transfer_price(
            metrics["disk_read_bytes"], metrics["disk_written_bytes"]
        )
    costs = {"cost_per_hour": cost / max(hours, 1e-12), "cost": cost}
    return PlanRow(point, {**metrics, **costs})


def cost_bounds(
    configuration: Configuration, rows: Sequence[PlanRow], prices: Prices,
    kv_bytes_per_token: float = math.inf,
) -> dict[str, float]:  # fmt: skip
    """Return lower bounds of a configuration's cost without simulation.

    ``rows`` are its evaluated neighbours; its makespan is at least the shortest of theirs.
    """
    hourly_price = _price_per_hour(configuration, prices, kv_bytes_per_token, 0.0)
    return {
        "cost_per_hour": hourly_price,
        "cost": hourly_price * min((row["makespan_s"] for row in rows), default=0.0) / 3600,
    }


def _price_per_hour(
    point: Configuration, prices: Prices, kv_bytes_per_token: float, used_gib: float
) -> float:
    return prices.price_per_hour(
        instances=point.instances,
        dram_gib=point.dram_gib,
        disk=point.disk,
        disk_gib=point.disk_gib,
        used_gib=used_gib,
        mib_s=point.disk_mib_s,
        page_bytes=point.page_size * kv_bytes_per_token,
    )
