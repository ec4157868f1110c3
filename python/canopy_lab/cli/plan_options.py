"""The options of ``canopy plan``, checked and turned into what the planner takes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

from canopy_lab.advise.advice import advised_policy
from canopy_lab.advise.sample import sample_of
from canopy_lab.cli.plan_arguments import ADVISED
from canopy_lab.cli.validate import read_validation
from canopy_lab.plan.backend import NAMES as BACKENDS
from canopy_lab.plan.choice import parse_constraints
from canopy_lab.plan.objective import metric
from canopy_lab.plan.planner import LOADS, PlanRequest
from canopy_lab.plan.prices import GIB, Prices, load_prices
from canopy_lab.plan.search import SearchOptions
from canopy_lab.plan.space import GROUP, TTL, Configuration
from canopy_lab.plan.system import Engine
from canopy_lab.plan.worker import PlanInputs
from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.system.config import ROUTINGS
from canopy_lab.sim.system.engine_profile import EngineProfile, load_profile
from canopy_lab.trace.open import format_names, open_trace
from sglang_canopy.config.server_settings import (
    PREFETCH_POLICIES,
    SCHEDULE_POLICIES,
    WRITE_POLICIES,
    ServerSettings,
    chunk_of,
)
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import served_names

ADVICE_REQUESTS = 5_000
"""Of the trace, in whole conversations, on which policies are compared."""
DEVICE_GIB = 40.0
"""KV room of a device whose profile does not say."""


@dataclass(frozen=True, slots=True)
class PlanCommand:
    """The command line, checked."""

    args: argparse.Namespace
    path: str
    format: str
    request: PlanRequest
    profile: EngineProfile
    engine: Engine
    policy: str | None
    """``None``: to be advised."""
    policy_configs: Mapping[str, Mapping[str, Any]]


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
    prices = prices_of(args, profile)
    disks = None if args.disks is None else _names(args.disks)
    if disks == ("none",):
        disks = ()
    for name in disks or ():
        prices.disk(name)
    policy, configs = policy_of(args.policy)
    request = PlanRequest(
        disks=disks,
        ttls=tuple(map(_ttl, _names(args.ttl))),
        instances=tuple(_whole("--instances", text) for text in _names(args.instances)),
        page_sizes=tuple(_whole("--page-size", text) for text in _names(args.page_size)),
        prefetch_policies=_of("--prefetch-policy", args.prefetch_policy, PREFETCH_POLICIES),
        write_policies=_of("--write-policy", args.write_policy, WRITE_POLICIES),
        schedule_policies=_of("--schedule-policy", args.schedule_policy, SCHEDULE_POLICIES),
        chunked_prefill_sizes=_chunks(args),
        dram_most_gib=_size("--dram-max-gib", args.dram_max_gib),
        disk_most_gib=_size("--disk-max-gib", args.disk_max_gib),
        dram_levels=args.dram_levels,
        disk_levels=args.disk_levels,
        baseline_gib=_size("--baseline-gib", args.baseline_gib),
        objectives=tuple(metric(name).name for name in _names(args.objectives)),
        constraints=constraints,
        minimise=wanted,
        grid=args.grid,
        sample_requests=args.sample_requests,
        options=SearchOptions(tolerance=args.tolerance, evaluations=args.evaluations),
        loads=_loads(args.scale_traffic),
        checks=not args.no_checks,
        confidence=PlanRequest().confidence if args.confidence is None else args.confidence,
    )
    if args.sample_requests < 0:
        raise CanopyError(f"--sample-requests must be 0 or more, got {args.sample_requests}")
    for levels in (request.dram_levels, request.disk_levels):
        if not 1 <= levels <= 64:
            raise CanopyError(f"--dram-levels and --disk-levels must be 1 to 64, got {levels}")
    if not 0 <= request.confidence < 1 or (args.confidence and args.no_checks):
        raise CanopyError(
            f"--confidence must be 0 or more and below 1, without --no-checks, got {args.confidence}"
        )
    if args.validation:
        read_validation(args.validation)
    for out in (args.json, args.html, args.output):
        if out and not Path(out).resolve().parent.is_dir():
            raise CanopyError(f"cannot write {out!r}: its folder does not exist; make it first")
    if args.routing not in ROUTINGS:
        raise CanopyError(f"--routing must be one of {', '.join(ROUTINGS)}, got {args.routing!r}")
    if args.backend not in BACKENDS:
        raise CanopyError(f"--backend must be one of {', '.join(BACKENDS)}, got {args.backend!r}")
    if not 0 < args.load <= 1000:
        raise CanopyError(f"--load must be above 0 and at most 1000, got {args.load}")
    form = args.format or _guess(path)
    if args.conversations is not None and form != "agentic":
        raise CanopyError(f"--conversations needs --format agentic, got {form!r}")
    engine = _engine(args, profile)
    for page, chunk in product(request.page_sizes, request.chunked_prefill_sizes):
        engine.settings_of(Configuration(page_size=page, chunked_prefill_size=chunk))
    command = PlanCommand(args, path, form, request, profile, engine, policy, configs)
    PlanInputs(CompactTrace(()), engine, prices, configs)
    return command


def prices_of(args: argparse.Namespace, profile: EngineProfile) -> Prices:
    """The price list, for as many GPUs an instance as the profile is of. Raises ``CanopyError``."""
    prices = load_prices(args.prices)
    noted = profile.notes.get("gpus")
    gpus = args.gpus_per_instance
    if gpus is None and type(noted) is int:
        gpus = noted
    if gpus is None:
        return prices
    if gpus < 1:
        raise CanopyError(f"--gpus-per-instance must be 1 or more, got {gpus}")
    return replace(prices, gpus_per_instance=gpus)


def compared(args: argparse.Namespace) -> list[tuple[str, float | None]]:
    """The profiles of ``--compare`` and what an hour of their GPUs costs."""
    found = []
    for text in _names(args.compare):
        name, separator, price = text.partition("=")
        try:
            each = float(price) if separator else None
        except ValueError:
            each = -1.0
        if each is not None and not 0 <= each < float("inf"):
            raise CanopyError(f"--compare must be PROFILE or PROFILE=USD a GPU-hour, got {text!r}")
        load_profile(name)
        found.append((name, each))
    return found


def _loads(text: str | None) -> tuple[float, ...]:
    if text is None:
        return LOADS
    try:
        given = [float(part) for part in _names(text)]
    except ValueError:
        given = [-1.0]
    if min(given) <= 0 or max(given) > 1000:
        raise CanopyError(f"--scale-traffic must be numbers above 0, such as 2,3; got {text!r}")
    return tuple(dict.fromkeys((*LOADS, *given)))


def _engine(args: argparse.Namespace, profile: EngineProfile) -> Engine:
    tokens, noted = args.device_tokens, profile.notes.get("device_tokens")
    known = tokens is not None or type(noted) is int
    if tokens is None:
        assumed = round(DEVICE_GIB * GIB / profile.kv_bytes_per_token)
        tokens = noted if type(noted) is int else assumed
    if tokens < 1:
        raise CanopyError(f"--device-tokens must be 1 or more, got {tokens}")
    given = {name: getattr(args, name, None) for name in ServerSettings.__slots__}
    given |= dict.fromkeys(("page_size", "chunked_prefill_size", "schedule_policy"))
    return Engine(profile, tokens, args.routing, ServerSettings(**given), known)


def _chunks(args: argparse.Namespace) -> tuple[int, ...]:
    if args.chunked_prefill_size is None:
        return (chunk_of(args.gpu_memory_gib),)
    names = _names(args.chunked_prefill_size)
    return tuple(_whole("--chunked-prefill-size", text) for text in names)


def _of(option: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    names = _names(text)
    for name in names:
        if name not in allowed:
            raise CanopyError(f"{option} must be of {', '.join(allowed)}, got {name!r}")
    return names


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


def policy_of(text: str) -> tuple[str | None, dict[str, Mapping[str, Any]]]:
    """The policy's name and options; no name where it is to be advised. Raises ``CanopyError``."""
    name, separator, body = text.partition("=")
    if name == ADVISED and not separator:
        return None, {}
    if name not in served_names():
        close = get_close_matches(name, served_names(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise CanopyError(
            f"--policy: unknown policy {name!r}; choose from: {', '.join(served_names())}{hint}"
        )
    if not separator:
        return name, {}
    try:
        config = json.loads(body)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise CanopyError(f"--policy must be NAME or NAME=JSON object, got {text!r}")
    return name, {name: config}


def advised(command: PlanCommand, trace: CompactTrace) -> tuple[PlanCommand, str]:
    """``command`` for the policy that it names, else for the one that ``advise`` finds at the
    devices' pools; and the reason in words."""
    name, configs = command.policy, command.policy_configs
    why = f"Policy: {name}, as you asked."
    if name is None:
        pool = command.engine.device_tokens * min(command.request.instances)
        sample = sample_of(trace, ADVICE_REQUESTS)
        arm, decision = advised_policy(sample, command.profile, pool, jobs=command.args.jobs)
        name, configs = arm.policy, {arm.policy: dict(arm.config)} if arm.config else {}
        why = f"Policy: {name}, as canopy advise finds. {decision.sentence}"
    chosen = (name,)
    request = replace(
        command.request, device_policies=chosen, host_policies=chosen, disk_policies=chosen
    )
    return replace(command, request=request, policy=name, policy_configs=configs), why
