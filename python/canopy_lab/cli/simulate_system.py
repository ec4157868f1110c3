"""``canopy simulate system``: one configuration of instances, memory and disk over a trace."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path

from canopy_lab.cli.system_loads import parse_loads, run_loads
from canopy_lab.latency.report import WARM_UP_SHARE
from canopy_lab.latency.slo import parse_slo
from canopy_lab.report.table import bytes_text
from canopy_lab.sim.system import (
    SystemConfig,
    SystemResult,
    TierSpec,
    Workload,
    load_profile,
    simulate_system,
)
from canopy_lab.sim.system.arrivals import Arrivals, ClosedLoop, OpenLoop, TurnsWait
from canopy_lab.sim.system.config import PREFETCH_POLICIES, ROUTINGS
from canopy_lab.sim.system.engine_profile import Bandwidth, EngineProfile, profile_names
from canopy_lab.sim.system.gate import SESSION_GATES
from canopy_lab.sim.system.loads import LoadedSystem
from canopy_lab.sim.system.queue_order import QUEUE_ORDERS
from canopy_lab.sim.system.waiting import WAITING_PREFIXES
from canopy_lab.sim.system.write_policy import WRITE_POLICIES
from canopy_lab.trace.open import format_names, open_trace
from sglang_canopy.errors import CanopyError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``canopy simulate system``."""
    add = parser.add_argument
    add("--trace", required=True, metavar="PATH", help="trace file")
    add("--format", required=True, help=f"trace format: {', '.join(format_names())}")
    add(
        "--profile",
        required=True,
        help=f"costs of the engine: a file, or one of: {', '.join(profile_names())}",
    )
    add("--model", metavar="NAME", help="stop if the profile is of another model")
    add(
        "--device-tokens",
        type=int,
        required=True,
        metavar="N",
        help="KV pool of one instance, in tokens",
    )
    add(
        "--host-gb", type=float, default=0.0, metavar="G", help="host memory of one instance, in GB"
    )
    add("--host-gb-per-s", type=float, metavar="G", help="its bandwidth (default: the profile's)")
    add(
        "--disk-gb",
        type=float,
        default=0.0,
        metavar="G",
        help="size of the disk, one for all instances, in GB",
    )
    add(
        "--disk-read-gb-per-s",
        type=float,
        metavar="G",
        help="its read bandwidth (default: the profile's)",
    )
    add(
        "--disk-write-gb-per-s",
        type=float,
        metavar="G",
        help="its write bandwidth (default: as for reads)",
    )
    add("--disk-per-instance", action="store_true", help="each instance has a disk of its own")
    add(
        "--shared-channel",
        action="store_true",
        help="the disk's reads and writes share its bandwidth",
    )
    add("--ttl-s", type=float, metavar="S", help="TTL of everything on host and disk, in seconds")
    add("--instances", type=int, default=1, metavar="N", help="number of servers")
    add(
        "--routing", default=ROUTINGS[0], choices=ROUTINGS, help="how requests are spread over them"
    )
    add("--policy", default="lru", help="eviction policy of every tier")
    add(
        "--write-policy",
        default="write_through",
        choices=tuple(WRITE_POLICIES),
        help="as SGLang's --hicache-write-policy",
    )
    add(
        "--prefetch-policy",
        default=PREFETCH_POLICIES[0],
        choices=PREFETCH_POLICIES,
        help="as SGLang's --hicache-storage-prefetch-policy",
    )
    add(
        "--max-running",
        type=int,
        default=256,
        metavar="N",
        help="requests that decode at the same time",
    )
    add(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="tokens that clients allow an answer, which the server reserves a share of (default: "
        "what each generates)",
    )
    add(
        "--fixed-outputs",
        action="store_true",
        help="clients fix the length of their answers (ignore_eos): all of it is reserved",
    )
    add(
        "--schedule-conservativeness",
        type=float,
        default=1.0,
        metavar="X",
        help="as SGLang's",
    )
    add(
        "--chunked-prefill-tokens",
        type=int,
        default=8192,
        metavar="N",
        help="most tokens of one prefill step",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="K",
        help="seed of the routing's ties, of spread stamps and of sessions' starts",
    )
    add("--skip-bad", type=int, default=0, metavar="N", help="pass over N broken lines")
    add(
        "--keep-stamps",
        action="store_true",
        help="let requests of one time stamp come at once; else, where a trace notes times in "
        "steps, they are spread over the step (see --seed)",
    )
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument(
        "--turns-wait",
        action="store_true",
        help="send a turn only after the answer to the one before it",
    )
    loop.add_argument(
        "--closed-loop",
        action="store_true",
        help="agents: send a turn after the answer to the one before it and the time to think "
        "that the trace says, or the gap between the two",
    )
    add(
        "--sessions-per-hour",
        type=float,
        metavar="N",
        help="of a closed loop: sessions that begin in an hour (default: as in the trace)",
    )
    add(
        "--think-cap-s",
        type=float,
        default=120.0,
        metavar="S",
        help="of a closed loop: longest time to think",
    )
    add(
        "--schedule-policy",
        default="fcfs",
        choices=tuple(QUEUE_ORDERS),
        help="order of the queue, as SGLang's --schedule-policy",
    )
    add(
        "--session-gate",
        default="none",
        choices=tuple(SESSION_GATES),
        help="which sessions may join the queue",
    )
    add(
        "--waiting-prefixes",
        default="by-place",
        choices=tuple(WAITING_PREFIXES),
        help="what waiting does to a request's cached prefix: by-place as Canopy's tree, awaited "
        "as that with --canopy-protect-waiting off, touched as SGLang's own lru",
    )
    add(
        "--loads",
        metavar="SHARES",
        help="run several loads, as shares of the saturation, which is found: 0.6,0.8,0.95,1.1",
    )
    add(
        "--saturation",
        type=float,
        metavar="RATE",
        help="with --loads: take this as the saturation, in requests a second or, in a closed "
        "loop, sessions an hour; to compare settings at the same loads",
    )
    add("--seeds", type=int, default=1, metavar="N", help="with --loads: runs of each, from --seed")
    add(
        "--slo",
        metavar="TARGET",
        help="with --loads: a target such as p99_ttft<2s; the highest load that meets it is found",
    )
    add(
        "--warm-up-share",
        type=float,
        default=WARM_UP_SHARE,
        metavar="S",
        help="with --loads: leave out this share of the requests, the first",
    )
    add("--requests", type=int, metavar="N", help="only the first N of the trace")
    add("--json", metavar="OUT", help="write the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Simulate, print, write what was asked for."""
    if args.json and not Path(args.json).resolve().parent.is_dir():
        raise CanopyError(f"cannot write {args.json!r}: its folder does not exist; make it first")
    profile = load_profile(args.profile, args.model)
    ttl = {"ttl": args.ttl_s, "policy": args.policy}
    host = disk = None
    if args.host_gb:
        speed = _speed(args.host_gb_per_s, None, profile.host, "--host-gb-per-s")
        host = _tier(args.host_gb, speed, ttl)
    if args.disk_gb:
        given = (args.disk_read_gb_per_s, args.disk_write_gb_per_s)
        speed = _speed(*given, profile.disk, "--disk-read-gb-per-s")
        disk = _tier(args.disk_gb, speed, {**ttl, "shared_channel": args.shared_channel})
    config = SystemConfig(
        device_tokens=args.device_tokens,
        instances=args.instances,
        routing=args.routing,
        device_policy=args.policy,
        host=host,
        disk=disk,
        disk_per_instance=args.disk_per_instance,
        max_running=args.max_running,
        max_new_tokens=args.max_new_tokens,
        fixed_outputs=args.fixed_outputs,
        schedule_conservativeness=args.schedule_conservativeness,
        chunked_prefill_tokens=args.chunked_prefill_tokens,
        write_policy=args.write_policy,
        prefetch_policy=args.prefetch_policy,
        schedule_policy=args.schedule_policy,
        session_gate=args.session_gate,
        waiting_prefixes=args.waiting_prefixes,
    )
    if args.loads is not None:
        return _loads(args, config, profile)
    for option in ("slo", "saturation"):
        if getattr(args, option) is not None:
            raise CanopyError(f"--{option} is for several loads; give --loads as well")
    workload = _workload(args)
    result = simulate_system(
        workload, config, profile, seed=args.seed, arrivals=_arrivals(args, workload)
    )
    print(summary(result, f"{profile.name} ({profile.source})"))
    if args.json:
        Path(args.json).write_text(json.dumps(result.to_json(), indent=1) + "\n")
    return 0


def _workload(args: argparse.Namespace) -> Workload:
    if args.requests is not None and args.requests < 1:
        raise CanopyError(f"--requests must be 1 or more, got {args.requests}")
    trace = open_trace(args.trace, args.format, skip_bad=args.skip_bad)
    return Workload(
        itertools.islice(trace, args.requests), keep_stamps=args.keep_stamps, seed=args.seed
    )


def _loads(args: argparse.Namespace, config: SystemConfig, profile: EngineProfile) -> int:
    """Several loads instead of one run."""
    if args.sessions_per_hour is not None:
        raise CanopyError("--sessions-per-hour is for one run; leave out it or --loads")
    if args.seeds < 1:
        raise CanopyError(f"--seeds must be 1 or more, got {args.seeds}")
    if args.saturation is not None and not 0 < args.saturation < math.inf:
        raise CanopyError(f"--saturation must be a rate above 0, got {args.saturation}")
    loads = parse_loads(args.loads)
    slo = None if args.slo is None else parse_slo(args.slo)
    system = LoadedSystem(
        _workload(args),
        config,
        profile,
        loop="closed" if args.closed_loop else "turns-wait" if args.turns_wait else "open",
        think_cap_s=args.think_cap_s,
        warm_up_share=args.warm_up_share,
        keep_stamps=args.keep_stamps,
    )
    made = run_loads(
        system,
        loads,
        range(args.seed, args.seed + args.seeds),
        unit="sessions/h" if args.closed_loop else "requests/s",
        saturation=args.saturation,
        slo=slo,
    )
    print(f"profile      {profile.name} ({profile.source})")
    print(made.text())
    if args.json:
        Path(args.json).write_text(json.dumps(made.to_json(), indent=1) + "\n")
    return 0


def _arrivals(args: argparse.Namespace, workload: Workload) -> Arrivals:
    if args.closed_loop:
        return ClosedLoop(
            workload,
            sessions_per_hour=args.sessions_per_hour,
            think_cap_s=args.think_cap_s,
            seed=args.seed,
        )
    if args.sessions_per_hour is not None:
        raise CanopyError("--sessions-per-hour is for agents; give --closed-loop as well")
    return TurnsWait(workload) if args.turns_wait else OpenLoop(workload)


def summary(result: SystemResult, profile: str) -> str:
    """What is printed."""
    hits = ", ".join(f"{t} {n:.1%}" for t, n in result.token_hit_ratio_by_tier.items())
    held = ", ".join(f"{t} {bytes_text(int(n))}" for t, n in result.mean_bytes_by_tier.items())
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
            f"held         {held} (mean)",
            f"disk         {bytes_text(int(result.disk_read_bytes))} read, "
            f"{bytes_text(int(result.disk_written_bytes))} written",
            f"simulated    {result.events:,} events in {result.seconds:.1f} s",
        )
    )


def _speed(
    read: float | None, write: float | None, known: Bandwidth | None, option: str
) -> tuple[float, float]:
    """Bytes/s of reads and writes."""
    if read is not None:
        return read * 1e9, (read if write is None else write) * 1e9
    if known is None:
        raise CanopyError(f"the profile has no bandwidth for this tier; give {option}")
    return known.read_bytes_per_s, known.write_bytes_per_s if write is None else write * 1e9


def _tier(size_gb: float, speed: tuple[float, float], others: dict) -> TierSpec:
    return TierSpec(size_gb * 1e9, *speed, **others)
