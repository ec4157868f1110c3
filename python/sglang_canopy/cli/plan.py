"""``canopy plan``: how much DRAM and disk a workload should get, before it is paid for."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sglang_canopy.errors import CanopyError
from sglang_canopy.plan.backend import NAMES as BACKENDS
from sglang_canopy.plan.cache import default_folder
from sglang_canopy.plan.choice import configuration_of, parse_constraints
from sglang_canopy.plan.objective import DEFAULT_OBJECTIVES, Row, metric
from sglang_canopy.plan.planner import Plan, Request, make_plan, to_json
from sglang_canopy.plan.prices import GIB, load_prices
from sglang_canopy.plan.search import Options
from sglang_canopy.plan.server_plan import server_plan
from sglang_canopy.plan.space import GROUP, TTL, Configuration
from sglang_canopy.plan.system import Engine
from sglang_canopy.plan.watch import Slot, changed, cut
from sglang_canopy.plan.worker import Work, at_load
from sglang_canopy.policy.registry import policy_names
from sglang_canopy.report.plan_html import write_figures, write_page, write_private
from sglang_canopy.report.plan_text import plan_text
from sglang_canopy.sim.compact import CompactTrace
from sglang_canopy.sim.system.config import ROUTINGS
from sglang_canopy.sim.system.profile import EngineProfile, load_profile
from sglang_canopy.tier.plan_file import write_plan
from sglang_canopy.tier.ttl import SERVER_HASH, TRACE_HASH
from sglang_canopy.trace.open import format_names, open_trace
from sglang_canopy.trace.overlay import overlay
from sglang_canopy.trace.record import TraceRequest
from sglang_canopy.trace.sglang_log import read_as_server

PROFILE, PRICES = "llama-3.1-8b-h100", "aws-us-east-1"
DEVICE_GIB = 40.0
"""KV room of a device whose profile does not say."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``canopy plan``."""
    add = parser.add_argument
    add("path", nargs="?", metavar="TRACE", help="the trace, or --trace PATH")
    add("--trace", metavar="PATH", help="trace file, or archive of conversations")
    add("--format", help=f"{', '.join(format_names())} (default: what fits the first line)")
    add("--profile", default=PROFILE, help="engine profile: a name or a file (default %(default)s)")
    add("--model", metavar="NAME", help="the model you serve: the profile must be of it")
    add("--prices", default=PRICES, help="price list: a name or a file (default %(default)s)")
    add("--slo", action="append", default=[], metavar="C", help='limits, e.g. "p99_ttft<2s"')
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument("--minimise", "--minimize", default="cost", metavar="METRIC")
    wanted.add_argument("--maximise", "--maximize", metavar="METRIC")
    add("--objectives", default=",".join(DEFAULT_OBJECTIVES), metavar="A,B", help="of the front")
    add("--json", metavar="OUT", help="write everything as JSON")
    add("--html", metavar="OUT", help="write the report with figures")
    add("--figures", metavar="FOLDER", help="write the report's figures as PNG")
    add("--output", metavar="PLAN", help="write the plan file for --canopy-plan")
    add("--disk-path", metavar="FOLDER", help="the disk store's folder, for the plan file")
    size = parser.add_argument_group("what may be chosen")
    add = size.add_argument
    add("--disks", metavar="A,B", help="disk classes of the price list, 'none' for no disk")
    add(
        "--ttl",
        default="none,group",
        metavar="A,B",
        help="none, seconds, group (default %(default)s)",
    )
    add("--instances", default="1", metavar="N,N")
    for tier in ("device", "host", "disk"):
        add(f"--{tier}-policy", default="lru", metavar="A,B", help=f"eviction on the {tier}")
    add("--policy-config", action="append", default=[], metavar="NAME=JSON")
    add("--dram-max-gib", type=float, default=0, metavar="G", help="all instances together")
    add("--disk-max-gib", type=float, default=0, metavar="G")
    add("--dram-levels", type=int, default=9, metavar="N")
    add("--disk-levels", type=int, default=6, metavar="N")
    add("--baseline-gib", type=float, default=0, metavar="G", help="DRAM of the fixed baseline")
    engine = parser.add_argument_group("the simulated engine")
    add = engine.add_argument
    add("--device-tokens", type=int, metavar="N", help="KV pool of one device, in tokens")
    add("--routing", default="prefix-aware", help=f"{', '.join(ROUTINGS)} (default %(default)s)")
    add("--max-running", type=int, default=256, metavar="N")
    how = parser.add_argument_group("how it is searched")
    add = how.add_argument
    add("--grid", action="store_true", help="evaluate the full grid instead")
    add("--budget", type=float, default=0.25, metavar="SHARE", help="of the grid, at most")
    add("--tolerance", type=float, default=Options().tolerance, metavar="SHARE")
    add("--no-checks", action="store_true", help="no neighbours and no other loads")
    add("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes")
    add("--backend", default="local", help=f"{' or '.join(BACKENDS)} (default %(default)s)")
    add("--cache", metavar="FOLDER", help="simulations already done (default: user's cache)")
    add("--no-cache", action="store_true")
    reading = parser.add_argument_group("what is read")
    add = reading.add_argument
    add("--skip-bad", type=int, default=0, metavar="N", help="pass over N broken lines")
    add("--load", type=float, default=1.0, metavar="X", help="the same requests X times as fast")
    add("--block-tokens", type=int, default=64, metavar="N", help="the server's (format sglang)")
    add("--requests", type=int, default=0, metavar="N", help="only the first N")
    add("--conversations", type=int, metavar="N", help="overlay N conversations of an archive")
    add("--window-s", type=float, default=3600.0, metavar="S", help="started within S seconds")
    add("--seed", type=int, default=0, help="of the overlay")
    watching = parser.add_argument_group("planning again and again, from the server's own log")
    add = watching.add_argument
    add("--watch", action="store_true", help="plan again every --every seconds")
    add("--last-hours", type=float, metavar="H", help="from the last H hours of the log")
    add("--same-slot-last-week", type=float, metavar="H", help="from the H hours a week ago")
    add("--every", type=float, default=3600.0, metavar="S")
    add("--rounds", type=int, default=0, metavar="N", help="stop after N plans; 0: go on")
    add("--gain", type=float, default=0.02, metavar="SHARE", help="smaller changes are no change")


@dataclass(frozen=True, slots=True)
class _Job:
    """The command line, checked."""

    args: argparse.Namespace
    path: str
    format: str
    request: Request
    profile: EngineProfile
    engine: Engine
    slot: Slot | None


def run(args: argparse.Namespace) -> int:
    """Plan, print, write what was asked for."""
    job = check(args)
    if not args.watch:
        plan, work, about = plan_once(job)
        print(plan_text(plan, work.prices.currency))
        for line in remarks(job, work):
            print(line)
        write_outputs(job, plan, work, about)
        return 0
    return watch(job)


def check(args: argparse.Namespace) -> _Job:
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
    configs = _policy_configs(args.policy_config)
    request = Request(
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
        options=Options(tolerance=args.tolerance, budget_share=args.budget),
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
        said = profile.notes.get("device_tokens")
        tokens = said if type(said) is int else round(DEVICE_GIB * GIB / profile.kv_bytes_per_token)
    if tokens < 1:
        raise CanopyError(f"--device-tokens must be 1 or more, got {tokens}")
    engine = Engine(profile, tokens, args.routing, args.max_running)
    job = _Job(args, path, form, request, profile, engine, slot)
    Work(CompactTrace(()), engine, prices, configs)
    return job


def plan_once(job: _Job) -> tuple[Plan, Work, dict[str, Any]]:
    """Read the trace and plan."""
    args = job.args
    trace, ids = read(job)
    prices, configs = load_prices(args.prices), _policy_configs(args.policy_config)
    work = Work(trace, job.engine, prices, configs, ids)
    cache = None if args.no_cache else Path(args.cache) if args.cache else default_folder()
    with tqdm(unit="run", desc="planning", disable=None) as bar:

        def progress(stage: str, done: int, most: int) -> None:
            bar.total = most
            bar.set_description(stage, refresh=False)
            bar.update(done - bar.n)

        plan = make_plan(
            job.request,
            work,
            jobs=args.jobs,
            backend=args.backend,
            cache=cache,
            progress=progress,
        )
    about = {
        "trace": job.path,
        "format": job.format,
        "requests": len(work.trace),
        "load": args.load,
        "profile": job.profile.name,
        "profile_source": job.profile.source,
        "prices": work.prices.name,
        "example_prices": work.prices.example,
        "price_sources": list(work.prices.sources),
        "device_tokens": job.engine.device_tokens,
        "routing": job.engine.routing,
        "trace_hash": plan.trace_hash,
        "date": datetime.date.today().isoformat(),
        **({"slot": str(job.slot)} if job.slot else {}),
    }
    return plan, work, about


def read(job: _Job) -> tuple[CompactTrace, str]:
    """The requests to plan for, and whose ids their blocks are.

    Raises ``CanopyError``, also for an empty trace.
    """
    args, ids = job.args, TRACE_HASH
    source: Iterable[TraceRequest]
    if args.conversations is not None:
        source = overlay(
            job.path, args.conversations, args.window_s, args.seed, skip_bad=args.skip_bad
        )
    elif job.format == "sglang" and _logs_tokens(job):
        ids = SERVER_HASH
        source = read_as_server(job.path, block_tokens=args.block_tokens, skip_bad=args.skip_bad)
    else:
        source = open_trace(job.path, job.format, skip_bad=args.skip_bad)
    if job.slot is not None:
        source = cut(source, job.slot)
    if args.requests:
        source = (r for at, r in zip(range(args.requests), source))
    trace = CompactTrace(at_load(source, args.load))
    if not len(trace):
        raise CanopyError(f"{job.path!r} has no requests; give a trace that has")
    return trace, ids


def _logs_tokens(job: _Job) -> bool:
    """Whether a server's log has token ids, so that its own block ids can be made."""
    args = job.args
    try:
        log = read_as_server(job.path, block_tokens=args.block_tokens, skip_bad=args.skip_bad)
        return next(log, None) is not None
    except CanopyError:
        return False  # prompts as text: the plain reader estimates their lengths


def remarks(job: _Job, work: Work) -> list[str]:
    """What a reader should know of the plan's ground."""
    lines = [
        "",
        f"{len(work.trace)} requests on {job.profile.name} ({job.profile.source}); device pool "
        f"{job.engine.device_tokens} tokens; routing {job.engine.routing}.",
    ]
    if work.prices.example:
        lines.append(
            f"Prices: {work.prices.name}, an example to replace by your own (docs/reference/price-list.md)."
        )
    return lines


def write_outputs(job: _Job, plan: Plan, work: Work, about: Mapping[str, Any]) -> None:
    """``--json``, ``--html`` and ``--output``."""
    args = job.args
    if args.json:
        text = json.dumps(to_json(plan, about), indent=1, allow_nan=False)
        write_private(Path(args.json), text + "\n")
    if args.html:
        write_page(args.html, plan, about, work.prices.currency)
    if args.figures:
        write_figures(args.figures, plan, work.prices.currency)
    if args.output:
        command = {"command": "canopy plan"}
        made = {k: v for k, v in {**command, **about}.items() if k != "price_sources"}
        write_plan(args.output, server_plan(plan.choice.row, work, made, args.disk_path))
        print(f"Start a server with it: --canopy-plan {args.output}")


def watch(job: _Job) -> int:
    """Plan every so often; write the plan file when it is worth a new start."""
    args, before, before_row = job.args, None, None
    done = 0
    while True:
        try:
            plan, work, about = plan_once(job)
        except CanopyError as error:
            if done == 0 and args.rounds == 1:
                raise
            print(f"no plan this time: {error}", flush=True)
        else:
            row = plan.choice.row
            now = datetime.datetime.now().isoformat(timespec="seconds")
            new = changed(before, row, args.gain, _now(plan, before, before_row))
            verb = "new plan" if new else "as before"
            print(f"{now} {about['requests']} requests of {job.slot}: {verb}: "
                  f"{configuration_of(row).label()}", flush=True)  # fmt: skip
            if new:
                print(plan_text(plan, work.prices.currency), flush=True)
                write_outputs(job, plan, work, about)
                before, before_row = configuration_of(row), row
        done += 1
        if args.rounds and done >= args.rounds:
            return 0
        time.sleep(args.every)


def _now(plan: Plan, before: Configuration | None, row: Row | None) -> Row | None:
    """What is running, on the new requests where the search has looked at it."""
    return plan.found.rows.get(before, row) if before is not None else row


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


def _policy_configs(texts: Iterable[str]) -> dict[str, Mapping[str, Any]]:
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
