"""``canopy simulate system``: one configuration of instances, memory and disk on a trace."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

from canopy_lab.cli.shared import PROFILE_HELP, TraceOptions
from canopy_lab.cli.system_loads import parse_loads, run_loads
from canopy_lab.cli.values import above_zero, out_file, write_json
from canopy_lab.latency.slo import SLO, parse_slo
from canopy_lab.report.units import bytes_text
from canopy_lab.sim.system import SystemConfig, SystemResult, TierSpec, Workload, load_profile
from canopy_lab.sim.system.engine_profile import EngineProfile
from canopy_lab.sim.system.loads import LoadedSystem
from sglang_canopy import declared
from sglang_canopy.declared import declare
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import SGLANGS_LRU


@dataclass(frozen=True, slots=True)
class Machines(declared.Checked):
    """Machines."""

    profile: str = declare(None, "--profile", PROFILE_HELP, metavar="NAME", required=True)
    host_gb: float = declare(
        0.0, "--host-gb", "host memory of one instance, in GB", metavar="G", low=0
    )
    disk_gb: float = declare(
        0.0, "--disk-gb", "size of the disk, one for all instances, in GB", metavar="G", low=0
    )
    disk_read_gb_per_s: float | None = declare(
        None, "--disk-read-gb-per-s", "its bandwidth, also of writes", metavar="G",
        shown_default="the profile's",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrafficOptions(TraceOptions):
    """Traffic."""

    requests: int | None = declare(
        None, "--requests", "only the first N of the trace", metavar="N", low=1
    )
    turns_wait: bool = declare(
        False, "--turns-wait", "send a turn only after the answer to the one before it"
    )
    closed_loop: bool = declare(
        False, "--closed-loop",
        "agents: send a turn after the answer to the one before it and the time to think",
    )  # fmt: skip
    think_cap_s: float = declare(
        120.0, "--think-cap-s", "closed loop: longest time to think", metavar="S"
    )
    seed: int = declare(0, "--seed", "seed of spread stamps and of sessions' starts", metavar="K")

    def __post_init__(self) -> None:
        declared.check(self)
        if self.turns_wait and self.closed_loop:
            raise CanopyError("give --turns-wait or --closed-loop, not both")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Loads and results."""

    loads: tuple[float, ...] | None = declare(
        None, "--loads",
        "run several loads, as shares of the saturation, which is found: 0.6,0.8,0.95,1.1",
        metavar="SHARES", parse=parse_loads,
    )  # fmt: skip
    saturation: float | None = declare(
        None, "--saturation",
        "with --loads: the saturation, in requests a second, or sessions an hour in a closed loop", metavar="RATE", parse=above_zero,
    )  # fmt: skip
    seeds: int = declare(
        1, "--seeds", "with --loads: runs of each, from --seed", metavar="N", low=1
    )
    slo: SLO | None = declare(
        None, "--slo",
        "with --loads: a target such as p99_ttft<2s; the highest load that meets it is printed",
        metavar="TARGET", parse=parse_slo,
    )  # fmt: skip
    json: Path | None = declare(
        None, "--json-out", "write the result as JSON", metavar="OUT", parse=out_file
    )

    def __post_init__(self) -> None:
        declared.check(self)
        for name in ("slo", "saturation"):
            if self.loads is None and getattr(self, name) is not None:
                raise CanopyError(f"--{name} is for several loads; give --loads as well")


OPTIONS = (Machines, SystemConfig, TrafficOptions, LoadOptions)


def run(
    machines: Machines, system: SystemConfig, traffic: TrafficOptions, load_options: LoadOptions
) -> None:
    profile = load_profile(machines.profile)
    loaded_system = LoadedSystem(
        Workload(itertools.islice(traffic.read(), traffic.requests), seed=traffic.seed),
        _with_tiers(machines, system, profile),
        profile,
        loop="closed" if traffic.closed_loop else "turns-wait" if traffic.turns_wait else "open",
        think_cap_s=traffic.think_cap_s,
    )
    source = f"{profile.name} ({profile.source})"
    if load_options.loads is None:
        result = loaded_system.run_at(seed=traffic.seed).system
        print(summary(result, source))
        result_json = result.to_json()
    else:
        loads = run_loads(
            loaded_system,
            load_options.loads,
            range(traffic.seed, traffic.seed + load_options.seeds),
            unit="sessions/h" if traffic.closed_loop else "requests/s",
            saturation=load_options.saturation,
            slo=load_options.slo,
        )
        print(f"profile      {source}\n{loads.text()}")
        result_json = loads.to_json()
    if load_options.json:
        write_json(load_options.json, result_json)


def _with_tiers(machines: Machines, system: SystemConfig, profile: EngineProfile) -> SystemConfig:
    """Return ``system`` with the tiers of ``machines``."""

    def make_tier(name: str, gb: float, gb_per_s: float | None = None) -> TierSpec | None:
        if not gb:
            return None
        profile_bandwidth = getattr(profile, name)
        if gb_per_s is None and profile_bandwidth is None:
            raise CanopyError(
                f"profile {profile.name!r} has no bandwidth of its {name}: measure one with canopy "
                "profile, or give --disk-read-gb-per-s"
            )
        read_bytes_per_s, write_bytes_per_s = (
            (profile_bandwidth.read_bytes_per_s, profile_bandwidth.write_bytes_per_s)
            if gb_per_s is None
            else (gb_per_s * 1e9, gb_per_s * 1e9)
        )
        return TierSpec(gb * 1e9, read_bytes_per_s, write_bytes_per_s, policy=system.device_policy)

    return replace(
        system,
        whole_nodes=system.device_policy == SGLANGS_LRU,
        touches_waiting=system.device_policy == SGLANGS_LRU,
        host=make_tier("host", machines.host_gb),
        disk=make_tier("disk", machines.disk_gb, machines.disk_read_gb_per_s),
    )


def summary(result: SystemResult, profile: str) -> str:
    """Return the printed summary."""
    hits = ", ".join(f"{t} {n:.1%}" for t, n in result.token_hit_ratio_by_tier.items())
    mean_bytes = ", ".join(f"{t} {bytes_text(n)}" for t, n in result.mean_bytes_by_tier.items())
    return "\n".join(
        (
            f"profile      {profile}",
            f"requests     {result.requests:,} in {result.makespan_s:,.0f} s",
            f"TTFT         mean {result.mean_ttft_s:.3f} s, P50 {result.p50_ttft_s:.3f}, "
            f"P90 {result.p90_ttft_s:.3f}, P99 {result.p99_ttft_s:.3f}",
            f"queue        mean {result.mean_queue_s:.3f} s, longest {result.peak_queue_length}",
            f"decode       {result.mean_tpot_s * 1000:.1f} ms a token",
            f"throughput   {result.throughput_tokens_per_s:,.0f} tokens/s, "
            f"of them {result.output_tokens_per_s:,.0f} generated",
            f"busy         {result.busy_share:.1%} of the time",
            f"token hits   {result.token_hit_ratio:.1%}: {hits}",
            f"held         {mean_bytes} (mean)",
            f"disk         {bytes_text(result.disk_read_bytes)} read, "
            f"{bytes_text(result.disk_written_bytes)} written",
            f"simulated    {result.events:,} events in {result.seconds:.1f} s",
        )
    )
