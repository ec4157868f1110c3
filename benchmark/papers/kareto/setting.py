"""The paper's regime: Qwen3-480B on eight H20, three traces, one and four instances.

From section 5.1: one instance is compute-constrained, four are compute-abundant; *the requests are
the same*. Model and machine are published figures put through the roofline, not measurements:
Qwen3-Coder-480B-A35B (62 layers, 8 KV heads of 128: 253,952 bytes a token; 8 of 160 experts of
2,560) with FP8 weights (480 GB) on 8 x 96 GB, of which about 150 GB are left for KV.

Traces A and B derive from an open data set that is not here: the synthetic presets calibrated to
its published statistics stand in. Trace C was made from an internal one and is not published: an
overlay of real coding-agent conversations stands in. Each is a window of 2 to 90 minutes instead
of two hours, so that a simulation takes half a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from roofline import Device, roofline_profile
from shared_traces import agents, trace_a, trace_b

from canopy_lab.plan.disk_class import DiskClass
from canopy_lab.plan.objective import PlanRow
from canopy_lab.plan.prices import Prices, load_prices
from canopy_lab.plan.space import Configuration
from canopy_lab.plan.system import Engine, row_of, system_of
from canopy_lab.plan.worker import PlanInputs
from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.model import ModelShape
from canopy_lab.sim.system import simulate_system
from canopy_lab.sim.system.engine_profile import EngineProfile
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.config.server_settings import SGLANG_DEFAULTS

TRACES = ("A", "B", "C")
TRACE_NAMES = {"A": "A: chat (synthetic)", "B": "B: API (synthetic)", "C": "C: agents (overlay)"}
INSTANCES = (1, 4)
DEVICE_TOKENS = 600_000
CONTEXT_TOKENS = 262_144
"""Context of Qwen3-480B; longer requests are dropped."""
MAX_RUNNING = 256
STAGING_GIB = 64.0
"""The DRAM of a "disk only" set-up: SGLang reads from storage into host memory."""
FIXED_GIB = 1024.0
"""The paper's baseline: DRAM of an instance, no disk."""
DISK_CLASS = "essd-pl1-striped"
_SHAPE = ModelShape(62, 6144, 96, 8, 128, 8 * 2560)
_H20X8 = Device("8 x NVIDIA H20 96 GB", 8 * 148e12, 8 * 4.0e12, 64e9, ("published H20 figures",))
_LOAD_FACTORS = {"A": 0.8, "B": 1.0, "C": 1.0}
"""Load as a multiple of the trace's rate: one instance without DRAM and disk is overloaded."""


@cache
def h20_profile() -> EngineProfile:
    """Eight H20 as one device. Published figures, not measured."""
    return roofline_profile(
        "qwen3-480b-h20x8", "Qwen3-Coder-480B-A35B", _SHAPE, 480e9, _H20X8, "2026-11-22"
    )


@cache
def example_prices() -> Prices:
    """Return the example prices for Alibaba Cloud: eight GPUs per instance, ESSD PL1 in parallel.

    A PL1 volume has at most 350 MB/s, from 460 GiB on. Bandwidth grows with the bought capacity
    (section 3.3): here up to 16 volumes of 460 GiB in parallel.
    """
    prices = load_prices("alibaba-essd")
    pl1 = prices.disk("essd-pl1")
    volumes = DiskClass(
        name=DISK_CLASS,
        per_gib_month=pl1.per_gib_month,
        smallest_gib=1.0,
        base_mib_s=0.0,
        per_gib_mib_s=350 / 460,
        most_mib_s=16 * 350,
        shared=True,  # the paper names one for all
    )
    return replace(prices, gpus_per_instance=8, disks={**prices.disks, DISK_CLASS: volumes})


@cache
def window_of_trace(name: str, data: Path) -> CompactTrace:
    """The window of a trace that is simulated, at its load."""
    if name == "A":
        return _window(trace_a(2250.0, None), 1800.0, 2250.0, _LOAD_FACTORS[name])
    if name == "B":
        return _window(trace_b(750.0), 600.0, 750.0, _LOAD_FACTORS[name])
    return _window(agents(data, 30, 10800.0), 2700.0, 8100.0, _LOAD_FACTORS[name])


@cache
def long_trace(name: str, data: Path) -> CompactTrace:
    """Two hours, as the paper's: 43,000 and 173,000 requests of A and B, and of agents."""
    if name == "C":
        return _window(agents(data, 40, 10800.0), 900.0, 8100.0, 1.0)
    return CompactTrace(trace_a(7200.0, None) if name == "A" else trace_b(7200.0))


def _window(
    requests: Iterable[TraceRequest], begin_s: float, end_s: float, load: float
) -> CompactTrace:
    return CompactTrace(
        replace(r, time_s=(r.time_s - begin_s) / load)
        for r in requests
        if begin_s <= r.time_s < end_s and r.input_tokens + r.output_tokens <= CONTEXT_TOKENS
    )


@cache
def make_inputs(name: str, data: Path) -> PlanInputs:
    """A trace on the regime's engine: what simulations of it share."""
    settings = replace(SGLANG_DEFAULTS, max_running_requests=MAX_RUNNING)
    engine = Engine(h20_profile(), DEVICE_TOKENS, "prefix-aware", settings)
    return PlanInputs(window_of_trace(name, data), engine, example_prices())


def make_configuration(instances: int, dram_gib: float, disk_gib: float = 0.0) -> Configuration:
    """A point of the space; without DRAM a disk gets the memory that it must have to be read."""
    if not disk_gib:
        return Configuration(instances, dram_gib, None, 0.0)
    # The paper's: a disk is read while a request waits for other reasons (section 3.3).
    memory_gib = max(dram_gib, STAGING_GIB)
    return Configuration(instances, memory_gib, DISK_CLASS, disk_gib, prefetch_policy="best_effort")


def simulate(inputs: PlanInputs, configuration: Configuration) -> PlanRow:
    """Simulate a configuration; the row of its metrics and cost."""
    system = system_of(configuration, inputs.engine, inputs.prices, inputs.policy_configs)
    result = simulate_system(inputs.loaded_workload(), system, inputs.engine.profile)
    return row_of(configuration, result.to_json(), inputs.prices)


def quoted_fields(row: PlanRow) -> dict[str, Any]:
    """Return the fields of a row that the tables quote."""
    tiers, configuration = row["token_hit_ratio_by_tier"], row.configuration
    return {
        "instances": configuration.instances,
        "dram_gib": configuration.dram_gib,
        "disk_gib": configuration.disk_gib,
        "hits": round(row["token_hit_ratio"], 4),
        "disk_hits": round(tiers.get("disk", 0.0), 4),
        "tokens_per_s": round(row["throughput_tokens_per_s"], 1),
        "mean_ttft_s": round(row["mean_ttft_s"], 4),
        "p99_ttft_s": round(row["p99_ttft_s"], 3),
        "queue_s": round(row["mean_queue_s"], 4),
        "cost_usd": round(row["cost"], 3),
        "usd_per_h": round(row["cost_per_hour"], 3),
    }
