"""The options of ``canopy plan``: their declaration and their checks."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.plan.backend import NAMES as BACKENDS
from sglang_canopy.plan.choice import parse_constraints
from sglang_canopy.plan.objective import DEFAULT_OBJECTIVES, metric
from sglang_canopy.plan.planner import PlanRequest
from sglang_canopy.plan.prices import GIB, load_prices
from sglang_canopy.plan.search import SearchOptions
from sglang_canopy.plan.space import GROUP, TTL
from sglang_canopy.plan.system import Engine
from sglang_canopy.plan.watch import Slot
from sglang_canopy.plan.worker import PlanInputs
from sglang_canopy.policy.registry import policy_names
from sglang_canopy.sim.compact import CompactTrace
from sglang_canopy.sim.system.config import ROUTINGS
from sglang_canopy.sim.system.engine_profile import EngineProfile, load_profile
from sglang_canopy.trace.open import format_names, open_trace

PROFILE, PRICES = "llama-3.1-8b-h100", "aws-us-east-1"
DEVICE_GIB = 40.0
"""KV room of a device whose profile does not say."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``canopy plan``."""
    add = parser.add_argument
    add("path", nargs="?", metavar="TRACE", help="the trace, or --trace PATH")
    add("--trace", metavar="PATH", help="trace file, or archive of conversations")
    add(
        "--format",
        help=f"trace format: {', '.join(format_names())} (default: what fits the first line)",
    )
    add("--profile", default=PROFILE, help="engine profile: a name or a file (default %(default)s)")
    add("--model", metavar="NAME", help="the model you serve; stop if the profile is of another")
    add("--prices", default=PRICES, help="price list: a name or a file (default %(default)s)")
    add(
        "--slo",
        action="append",
        default=[],
        metavar="C",
        help='limits, e.g. "p99_ttft<2s"; several with commas',
    )
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument(
        "--minimise",
        "--minimize",
        default="cost",
        metavar="METRIC",
        help="choose the least of this",
    )
    wanted.add_argument(
        "--maximise", "--maximize", metavar="METRIC", help="choose the most of this instead"
    )
    add(
        "--objectives",
        default=",".join(DEFAULT_OBJECTIVES),
        metavar="A,B",
        help="what the front is of, two or more",
    )
    add("--json", metavar="OUT", help="write everything as JSON")
    add("--html", metavar="OUT", help="write the report with figures")
    add("--figures", metavar="FOLDER", help="write the report's figures as PNG")
    add("--output", metavar="PLAN", help="write the plan file for --canopy-plan")
    add("--disk-path", metavar="FOLDER", help="the disk store's folder, for the plan file")
    size = parser.add_argument_group("what may be chosen")
    add = size.add_argument
    add(
        "--disks",
        metavar="A,B",
        help="disk classes of the price list (default: all); 'none' for no disk",
    )
    add(
        "--ttl",
        default="none,group",
        metavar="A,B",
        help="TTLs of the disk to try: none, a number of seconds, or group (one per prefix subtree)",
    )
    add("--instances", default="1", metavar="N,N", help="numbers of servers to try")
    for tier in ("device", "host", "disk"):
        add(
            f"--{tier}-policy",
            default="lru",
            metavar="A,B",
            help=f"eviction policies to try on the {tier}",
        )
    add(
        "--policy-config",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="options of a policy",
    )
    add(
        "--dram-max-gib",
        type=float,
        default=0,
        metavar="G",
        help="most DRAM, all instances together (default: the trace's distinct KV, at most 2 TiB)",
    )
    add(
        "--disk-max-gib",
        type=float,
        default=0,
        metavar="G",
        help="largest disk (default: the trace's distinct KV)",
    )
    add(
        "--dram-levels",
        type=int,
        default=9,
        metavar="N",
        help="sizes of DRAM to try, each twice the one before",
    )
    add("--disk-levels", type=int, default=6, metavar="N", help="sizes of disk to try")
    add(
        "--baseline-gib",
        type=float,
        default=0,
        metavar="G",
        help="DRAM of the fixed baseline (default: a quarter of the distinct KV)",
    )
    engine = parser.add_argument_group("the simulated engine")
    add = engine.add_argument
    add(
        "--device-tokens",
        type=int,
        metavar="N",
        help="KV pool of one device, in tokens (default: the profile's, or 40 GiB of KV)",
    )
    add("--routing", default="prefix-aware", help=f"how requests are spread: {', '.join(ROUTINGS)}")
    add(
        "--max-running",
        type=int,
        default=256,
        metavar="N",
        help="requests that decode at the same time",
    )
    how = parser.add_argument_group("how it is searched")
    add = how.add_argument
    add("--grid", action="store_true", help="evaluate the full grid instead")
    add(
        "--budget",
        type=float,
        default=0.25,
        metavar="SHARE",
        help="most configurations to evaluate, as a share of the grid",
    )
    add(
        "--tolerance",
        type=float,
        default=SearchOptions().tolerance,
        metavar="SHARE",
        help="skip points that could add less than this to the dominated volume",
    )
    add(
        "--no-checks",
        action="store_true",
        help="do not evaluate the choice's neighbours and other loads",
    )
    add("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes")
    add("--backend", default="local", help=f"where simulations run: {' or '.join(BACKENDS)}")
    add(
        "--cache",
        metavar="FOLDER",
        help="where simulations are kept (default: ~/.cache/canopy/plan)",
    )
    add("--no-cache", action="store_true", help="keep no simulations")
    reading = parser.add_argument_group("what is read")
    add = reading.add_argument
    add("--skip-bad", type=int, default=0, metavar="N", help="pass over N broken lines")
    add("--load", type=float, default=1.0, metavar="X", help="the same requests X times as fast")
    add(
        "--block-tokens",
        type=int,
        default=64,
        metavar="N",
        help="the server's block_tokens, for group TTLs from its log",
    )
    add("--requests", type=int, default=0, metavar="N", help="read only the first N requests")
    add(
        "--conversations",
        type=int,
        metavar="N",
        help="overlay N conversations of an archive, started within --window-s",
    )
    add(
        "--window-s",
        type=float,
        default=3600.0,
        metavar="S",
        help="seconds within which the conversations of an overlay start",
    )
    add("--seed", type=int, default=0, metavar="K", help="seed of the overlay")
    watching = parser.add_argument_group("planning again and again, from the server's own log")
    add = watching.add_argument
    add("--watch", action="store_true", help="plan again every --every seconds")
    add(
        "--last-hours",
        type=float,
        metavar="H",
        help="with --watch: plan from the last H hours of the log",
    )
    add(
        "--same-slot-last-week",
        type=float,
        metavar="H",
        help="with --watch: plan from the same H hours a week ago",
    )
    add(
        "--every",
        type=float,
        default=3600.0,
        metavar="S",
        help="with --watch: seconds between two plans",
    )
    add(
        "--rounds",
        type=int,
        default=0,
        metavar="N",
        help="with --watch: stop after N plans (0: never)",
    )
    add(
        "--gain",
        type=float,
        default=0.02,
        metavar="SHARE",
        help="with --watch: write the plan again only if cost or mean TTFT changes by more than this",
    )


@dataclass(frozen=True, slots=True)
class PlanCommand:
    """The command line, checked."""

    args: argparse.Namespace
    path: str
    format: str
    request: PlanRequest
    profile: EngineProfile
    engine: Engine
    slot: Slot | None


def check(args: argparse.Namespace) -> PlanCommand:
    """Every option. Raises ``CanopyError`` naming the first that is wrong."""
    if bool(args.trace) == bool(args.path):
        raise CanopyError("give one trace: canopy plan TRACE, or canopy plan --trace PATH")
    path = args.trace or args.path
    constraints = parse_constraints(args.slo)
    wanted = metric(args.maximise or args.minimise)
    if bool(args.maximise) != wanted.maximise:
        option, other = ("--maximise", "--minimise")[:: 1 if args.maximise else -1]
        raise CanopyError(f"{option} {wanted.name}: write {other} {wanted.name}")
    profile = load_profile(args.profile, args.model)
    prices = load_prices(args.prices)
    disks = None if args.disks is None else _names(args.disks)
    if disks == ("none",):
        disks = ()
    for name in disks or ():
        prices.disk(name)
    configs = policy_configs(args.policy_config)
    request = PlanRequest(
        disks=disks,
        ttls=tuple(map(_ttl, _names(args.ttl))),
        instances=tuple(_whole("--instances", text) for text in _names(args.instances)),
        device_policies=_policies("--device-policy", args.device_policy),
        host_policies=_policies("--host-policy", args.host_policy),
        disk_policies=_policies("--disk-policy", args.disk_policy),
        dram_most_gib=_size("--dram-max-gib", args.dram_max_gib),
        disk_most_gib=_size("--disk-max-gib", args.disk_max_gib),
        dram_levels=args.dram_levels,
        disk_levels=args.disk_levels,
        baseline_gib=_size("--baseline-gib", args.baseline_gib),
        objectives=tuple(metric(name).name for name in _names(args.objectives)),
        constraints=constraints,
        minimise=wanted,
        grid=args.grid,
        options=SearchOptions(tolerance=args.tolerance, budget_share=args.budget),
        checks=not args.no_checks,
    )
    for levels in (request.dram_levels, request.disk_levels):
        if not 1 <= levels <= 64:
            raise CanopyError(f"--dram-levels and --disk-levels must be 1 to 64, got {levels}")
    for out in (args.json, args.html, args.output):
        if out and not Path(out).resolve().parent.is_dir():
            raise CanopyError(f"cannot write {out!r}: its folder does not exist; make it first")
    if args.routing not in ROUTINGS:
        raise CanopyError(f"--routing must be one of {', '.join(ROUTINGS)}, got {args.routing!r}")
    if args.backend not in BACKENDS:
        raise CanopyError(f"--backend must be one of {', '.join(BACKENDS)}, got {args.backend!r}")
    if not 0 < args.load <= 1000:
        raise CanopyError(f"--load must be above 0 and at most 1000, got {args.load}")
    slot = _slot(args)
    form = args.format or _guess(path)
    if args.conversations is not None and form != "agentic":
        raise CanopyError(f"--conversations needs --format agentic, got {form!r}")
    tokens = args.device_tokens
    if tokens is None:
        noted = profile.notes.get("device_tokens")
        tokens = (
            noted if type(noted) is int else round(DEVICE_GIB * GIB / profile.kv_bytes_per_token)
        )
    if tokens < 1:
        raise CanopyError(f"--device-tokens must be 1 or more, got {tokens}")
    engine = Engine(profile, tokens, args.routing, args.max_running)
    command = PlanCommand(args, path, form, request, profile, engine, slot)
    PlanInputs(CompactTrace(()), engine, prices, configs)
    return command


def _slot(args: argparse.Namespace) -> Slot | None:
    if args.last_hours is not None and args.same_slot_last_week is not None:
        raise CanopyError("give --last-hours or --same-slot-last-week, not both")
    if args.every <= 0 or args.rounds < 0:
        raise CanopyError("--every must be above 0 seconds and --rounds 0 or more")
    if args.same_slot_last_week is not None:
        return Slot(args.same_slot_last_week, last_week=True)
    if args.last_hours is not None:
        return Slot(args.last_hours)
    return Slot(2.0) if args.watch else None


def _guess(path: str) -> str:
    """The format whose reader takes the first request."""
    if not Path(path).exists():
        raise CanopyError(f"no trace at {path!r}; give the path of an existing file")
    for name in format_names():
        try:
            first = next(iter(open_trace(path, name)), None)
        except CanopyError:
            continue
        if first is not None:
            return name
    raise CanopyError(
        f"{path!r} is empty or in no known format; give a trace with requests and its --format: "
        f"{', '.join(format_names())}"
    )


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names or len(set(names)) < len(names):
        raise CanopyError(f"a list must name each once, separated by commas, got {text!r}")
    return names


def _ttl(text: str) -> TTL:
    if text == "none":
        return None
    if text == GROUP:
        return GROUP
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise CanopyError(f"--ttl must be none, group or seconds above 0, got {text!r}")
    return seconds


def _whole(option: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise CanopyError(f"{option} must be whole numbers of 1 or more, got {text!r}")
    return int(text)


def _size(option: str, gib: float) -> float:
    if not 0 <= gib < float("inf"):
        raise CanopyError(f"{option} must be GiB, 0 for what fits the trace, got {gib}")
    return gib


def _policies(option: str, text: str) -> tuple[str, ...]:
    names = _names(text)
    for name in names:
        if name not in policy_names():
            close = get_close_matches(name, policy_names(), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise CanopyError(
                f"{option}: unknown policy {name!r}; choose from: {', '.join(policy_names())}{hint}"
            )
    return names


def policy_configs(texts: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for text in texts:
        name, separator, body = text.partition("=")
        try:
            config = json.loads(body)
        except ValueError:
            config = None
        if not separator or not isinstance(config, dict) or name not in policy_names():
            raise CanopyError(f"--policy-config must be NAME=JSON object, got {text!r}")
        found[name] = config
    return found
