"""The four workloads of the planner's benchmarks, short enough for dozens of simulations each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from canopy_lab.plan.planner import PlanRequest
from canopy_lab.plan.prices import GIB, load_prices
from canopy_lab.plan.search import SearchOptions
from canopy_lab.plan.space import GROUP, TTL
from canopy_lab.plan.system import Engine
from canopy_lab.plan.worker import PlanInputs, at_load
from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.system.engine_profile import load_profile
from canopy_lab.trace.open import open_trace
from canopy_lab.trace.record import TraceRequest

sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))
from overlays import overlay
from synthetic.presets import get_preset
from synthetic.trace import synthesise

DISKS = ("gp3", "io2")
TTLS = (None, 600.0, "group")


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace, and the load at which one instance is busy but not drowned."""

    name: str
    synthetic: bool
    load: float
    device_gib: float
    """KV pool of a device. Smaller than a real one's: short traces have little KV to keep."""


WORKLOADS = (
    Workload("trace-a", True, 1.0, 12),
    Workload("trace-b", True, 1.0, 4),
    Workload("agentic", False, 1.5, 24),
    Workload("conversation", False, 0.3, 16),
)
RATES = {"trace-a": 12.0, "trace-b": 30.0}
"""Requests a second of the synthetic presets: an instance's share, with the pauses as published."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of both benchmarks."""
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with mooncake/ and agentic_coding/")
    add("--requests", type=int, default=400, help="of each workload (default %(default)s)")
    add("--workloads", default=",".join(w.name for w in WORKLOADS))
    add("--profile", default="qwen2.5-7b-h100")
    add("--prices", default="aws-us-east-1")
    add("--disks", default=",".join(DISKS), help="classes of the price list (default %(default)s)")
    add("--ttls", default="none,600,group", help="of the disk (default %(default)s)")
    add("--jobs", type=int, default=2)
    add("--cache", type=Path, help="folder for simulations already done")
    add("--json", type=Path, help="write the results")
    add(
        "--load-per-instance",
        action="store_true",
        help="N instances get N times the load (default: the same requests, whatever their number)",
    )


def chosen(args: argparse.Namespace) -> list[Workload]:
    """Return the requested workloads."""
    names = args.workloads.split(",")
    unknown = set(names) - {w.name for w in WORKLOADS}
    if unknown:
        raise SystemExit(f"unknown workloads: {', '.join(sorted(unknown))}")
    return [w for w in WORKLOADS if w.name in names]


def work_of(workload: Workload, args: argparse.Namespace, instances: int = 1) -> PlanInputs:
    """The workload's requests on the profile's engine.

    They come as fast for four instances as for one, so that four have little to do (the paper's
    compute-abundant setting, section 5.1); ``--load-per-instance`` gives each instance the load of
    one instead.
    """
    profile = load_profile(args.profile)
    engine = Engine(
        profile, round(workload.device_gib * GIB / profile.kv_bytes_per_token), "prefix-aware"
    )
    load = workload.load * (instances if args.load_per_instance else 1)
    source = at_load(islice(_source(workload, args), args.requests), load)
    return PlanInputs(CompactTrace(source), engine, load_prices(args.prices))


def request(args: argparse.Namespace | None = None, instances: int = 1) -> PlanRequest:
    """The space of both benchmarks: DRAM, disk, 2 classes with bandwidth to be bought, 3 kinds of
    TTL."""
    return PlanRequest(
        disks=DISKS if args is None else tuple(args.disks.split(",")),
        choices={"ttl": TTLS if args is None else tuple(map(_ttl, args.ttls.split(",")))},
        instances=(instances,),
        checks=False,
        options=SearchOptions(),
    )


def _ttl(text: str) -> TTL:
    return None if text == "none" else GROUP if text == GROUP else float(text)


def _source(workload: Workload, args: argparse.Namespace) -> Iterable[TraceRequest]:
    if workload.synthetic:
        preset = get_preset(workload.name).at_rate(RATES[workload.name])
        seconds = 6 * args.requests / RATES[workload.name]
        return (drawn.request for drawn in synthesise(preset, seconds, seed=1))
    if workload.name == "agentic":
        archive = args.data / "agentic_coding" / "traces_500.tar.xz"
        return overlay(archive, max(10, args.requests // 30), 3600.0, seed=1)
    return open_trace(args.data / "mooncake" / "conversation_first60.jsonl", "mooncake")
