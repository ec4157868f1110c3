"""The options of ``canopy plan``, each declared once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from canopy_lab.cli.shared import format_option, skip_bad_option
from canopy_lab.cli.values import out_file
from canopy_lab.plan.choice import Constraint, parse_constraints
from canopy_lab.plan.objective import DEFAULT_OBJECTIVES, METRICS, Metric, metric
from canopy_lab.plan.planner import DISK_LEVELS, DRAM_LEVELS, LOADS, SAMPLE_REQUESTS, PlanRequest
from canopy_lab.plan.search import SearchOptions
from canopy_lab.plan.space import GROUP, TTL
from canopy_lab.sim.system.config import ROUTINGS
from canopy_lab.sim.system.engine_profile import load_profile
from sglang_canopy import declared
from sglang_canopy.config.server_settings import (
    PREFETCH_POLICIES,
    SCHEDULE_POLICIES,
    SGLANG_DEFAULTS,
    WRITE_POLICIES,
)
from sglang_canopy.declared import declare
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import AUTO, served_names

_GIVEN = SGLANG_DEFAULTS.to_json()
_TRIED = "SGLang's, the values to try"
_TAKEN = "SGLang's, for the simulation and the plan file"


# ---- parsers of options: each raises ``CanopyError`` with a "must be" message ----


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names or len(set(names)) < len(names):
        raise CanopyError(f"must name each once, separated by commas, got {text!r}")
    return names


def _integers(text: str) -> tuple[int, ...]:
    names = _names(text)
    if not all(name.isdecimal() and int(name) >= 1 for name in names):
        raise CanopyError(f"must be whole numbers of 1 or more, got {text!r}")
    return tuple(map(int, names))


def _of(allowed: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = _names(text)
        if not set(names) <= set(allowed):
            raise CanopyError(f"must be of {', '.join(allowed)}, got {text!r}")
        return names

    return parse


def _ttls(text: str) -> tuple[TTL, ...]:
    found: list[TTL] = []
    for name in _names(text):
        try:
            ttl: TTL = (
                {"none": None, GROUP: GROUP}[name] if name in ("none", GROUP) else float(name)
            )  # type: ignore[assignment]
        except ValueError:
            ttl = -1.0
        if isinstance(ttl, float) and not 0 < ttl < float("inf"):
            raise CanopyError(f"must be none, group or seconds above 0, got {name!r}")
        found.append(ttl)
    return tuple(found)


def _disks(text: str) -> tuple[str, ...]:
    names = _names(text)
    return () if names == ("none",) else names


def _loads(text: str) -> tuple[float, ...]:
    try:
        given = [float(part) for part in _names(text)]
    except ValueError:
        given = [-1.0]
    if min(given) <= 0 or max(given) > 1000:
        raise CanopyError(f"must be numbers above 0, such as 2,3; got {text!r}")
    return tuple(dict.fromkeys((*LOADS, *given)))


def _compared(text: str) -> tuple[tuple[str, float | None], ...]:
    found = []
    for part in _names(text):
        name, separator, price = part.partition("=")
        try:
            each = float(price) if separator else None
        except ValueError:
            each = -1.0
        if each is not None and not 0 <= each < float("inf"):
            raise CanopyError(f"must be PROFILE or PROFILE=USD a GPU-hour, got {part!r}")
        load_profile(name)
        found.append((name, each))
    return tuple(found)


def _objectives(text: str) -> tuple[str, ...]:
    return tuple(metric(name).name for name in _names(text))


@dataclass(frozen=True, slots=True)
class PolicyOption:
    """Value of ``--policy``; without a name, the policy is advised."""

    name: str | None = None
    config: Mapping[str, Any] | None = None


def _policy(text: str) -> PolicyOption:
    name, separator, body = text.partition("=")
    allowed = (AUTO, *served_names())
    if name not in allowed:
        close = get_close_matches(name, allowed, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise CanopyError(
            f"names an unknown policy {name!r}; choose from: {', '.join(allowed)}{hint}"
        )
    return PolicyOption(name, declared.json_object(body) if separator else None)


# ---- the options ----


@dataclass(frozen=True, slots=True)
class Reading:
    """Input."""

    trace: str = declare(None, "TRACE", "the trace: a file, or a server's own log")
    format: str = format_option()
    requests: int = declare(
        0, "--requests", "read only the first N requests; 0: all", metavar="N", low=0
    )
    last_hours: float | None = declare(
        None, "--last-hours", "plan from the last H hours of the log", metavar="H"
    )
    load: float = declare(
        1.0, "--load", "the same requests X times as fast", metavar="X", low=1e-3, high=1000
    )
    block_tokens: int = declare(
        64,
        "--block-tokens",
        "the server's block_tokens, for group TTLs from its log",
        metavar="N",
        low=1,
    )
    skip_bad: int = skip_bad_option()

    def __post_init__(self) -> None:
        declared.check(self)


@dataclass(frozen=True, slots=True)
class Choosing:
    """Limits and choices."""

    slo: tuple[Constraint, ...] = declare(
        (), "--slo", 'limits, e.g. "p99_ttft<2s"; several with commas', metavar="C",
        parse=lambda text: parse_constraints([text]), shown_default="none",
    )  # fmt: skip
    confidence: float | None = declare(
        None, "--confidence",
        "least probability of meeting the limits, over resampled traces",
        metavar="P", low=0, high=0.999, shown_default=f"{PlanRequest().confidence}; 0 with --no-checks",
    )  # fmt: skip
    best: Metric = declare(
        METRICS["cost"], "--best", "metric to minimise among the choices within the limits",
        metavar="METRIC", parse=metric, shown_default="cost",
    )  # fmt: skip
    objectives: tuple[str, ...] = declare(
        DEFAULT_OBJECTIVES, "--objectives", "metrics of the front, two or more", metavar="A,B",
        parse=_objectives, shown_default=",".join(DEFAULT_OBJECTIVES),
    )  # fmt: skip
    policy: PolicyOption = declare(
        PolicyOption(), "--policy", "policy of every tier: a name, or NAME=JSON",
        metavar="NAME", parse=_policy,
        shown_default="what canopy advise finds for this trace and the devices' pools",
    )  # fmt: skip
    prices: str = declare(
        "aws-us-east-1", "--prices", "price list: a name or a file", metavar="LIST"
    )
    disks: tuple[str, ...] | None = declare(
        None, "--disks", "disk classes of the price list; 'none' for no disk", metavar="A,B",
        parse=_disks, shown_default="all",
    )  # fmt: skip
    ttl: tuple[TTL, ...] = declare(
        (None, GROUP), "--ttl",
        "TTLs of the disk to try: none, seconds, or group",
        metavar="A,B", parse=_ttls, shown_default="none,group",
    )  # fmt: skip
    instances: tuple[int, ...] = declare(
        (1,),
        "--instances",
        "numbers of servers to try",
        metavar="N,N",
        parse=_integers,
        shown_default="1",
    )
    dram_max_gib: float = declare(
        0.0, "--dram-max-gib", "most DRAM, all instances together", metavar="G", low=0,
        shown_default="the trace's distinct KV, at most 2 TiB",
    )  # fmt: skip
    disk_max_gib: float = declare(
        0.0, "--disk-max-gib", "largest disk of an instance, or of a shared store", metavar="G", low=0,
        shown_default="the distinct KV",
    )  # fmt: skip
    dram_levels: int = declare(
        DRAM_LEVELS, "--dram-levels",
        "sizes of DRAM in the first grid", metavar="N", low=1, high=64,
    )  # fmt: skip
    disk_levels: int = declare(
        DISK_LEVELS, "--disk-levels", "sizes of disk in the first grid", metavar="N", low=1, high=64
    )
    baseline_gib: float = declare(
        0.0, "--baseline-gib", "DRAM of the fixed baseline", metavar="G", low=0,
        shown_default="a quarter of the distinct KV",
    )  # fmt: skip

    def __post_init__(self) -> None:
        declared.check(self)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The simulated engine, with SGLang's settings."""

    profile: str = declare(
        "llama-3.1-8b-h100", "--profile", "engine profile: a name or a file", metavar="NAME"
    )
    model: str | None = declare(
        None, "--model", "the served model; stop if the profile is of another", metavar="NAME"
    )
    device_tokens: int | None = declare(
        None, "--device-tokens", "KV pool of one device, in tokens", metavar="N", low=1,
        shown_default="the profile's, or 40 GiB of KV",
    )  # fmt: skip
    gpus_per_instance: int | None = declare(
        None, "--gpus-per-instance", "GPUs paid for per instance", metavar="N", low=1,
        shown_default="the profile's, else the price list's",
    )  # fmt: skip
    routing: str = declare("prefix-aware", "--routing", "how requests are spread", choices=ROUTINGS)
    page_size: tuple[int, ...] = declare(
        (1, 64), "--page-size", _TRIED, metavar="A,B", parse=_integers, shown_default="1,64"
    )
    prefetch_policy: tuple[str, ...] = declare(
        ("timeout", "wait_complete"), "--prefetch-policy", f"{_TRIED}: {', '.join(PREFETCH_POLICIES)}",
        metavar="A,B", parse=_of(PREFETCH_POLICIES), shown_default="timeout,wait_complete",
    )  # fmt: skip
    write_policy: tuple[str, ...] | None = declare(
        None, "--write-policy", f"{_TRIED}: {', '.join(WRITE_POLICIES)}",
        metavar="A,B", parse=_of(WRITE_POLICIES),
        shown_default=f"write_back if the policy is auto, else {_GIVEN['hicache_write_policy']}",
    )  # fmt: skip
    schedule_policy: tuple[str, ...] = declare(
        (_GIVEN["schedule_policy"],), "--schedule-policy", f"{_TRIED}: {', '.join(SCHEDULE_POLICIES)}",
        metavar="A,B", parse=_of(SCHEDULE_POLICIES), shown_default=_GIVEN["schedule_policy"],
    )  # fmt: skip
    chunked_prefill_size: tuple[int, ...] | None = declare(
        None, "--chunked-prefill-size", _TRIED, metavar="A,B", parse=_integers,
        shown_default="SGLang's for --gpu-memory-gib",
    )  # fmt: skip
    gpu_memory_gib: float = declare(80.0, "--gpu-memory-gib", "of one GPU", metavar="G", low=0)
    max_running_requests: int | None = declare(None, "--max-running", _TAKEN, metavar="N")
    max_prefill_tokens: int | None = declare(None, "--max-prefill-tokens", _TAKEN, metavar="N")
    schedule_conservativeness: float | None = declare(
        None, "--schedule-conservativeness", _TAKEN, metavar="X"
    )
    mem_fraction_static: float | None = declare(None, "--mem-fraction-static", _TAKEN, metavar="X")
    prefetch_threshold: int | None = declare(None, "--prefetch-threshold", _TAKEN, metavar="N")
    prefetch_timeout_base: float | None = declare(
        None, "--prefetch-timeout-base", _TAKEN, metavar="X"
    )
    prefetch_timeout_per_ki_token: float | None = declare(
        None, "--prefetch-timeout-per-ki-token", _TAKEN, metavar="X"
    )

    def __post_init__(self) -> None:
        declared.check(self)


@dataclass(frozen=True, slots=True)
class Searching:
    """Search."""

    sample_requests: int = declare(
        SAMPLE_REQUESTS, "--sample-requests",
        "search a trace twice as long on its N busiest; 0: on all", metavar="N", low=0,
    )  # fmt: skip
    evaluations: int = declare(
        SearchOptions().evaluations,
        "--evaluations",
        "most configurations to evaluate",
        metavar="N",
        low=1,
    )
    scale_traffic: tuple[float, ...] = declare(
        LOADS, "--scale-traffic", "also simulate the choice at X times the traffic", metavar="X,Y",
        parse=_loads, shown_default="0.8,1.2",
    )  # fmt: skip
    compare: tuple[tuple[str, float | None], ...] = declare(
        (), "--compare",
        "plan for each of these engine profiles, at USD a GPU-hour, and say which is best",
        metavar="PROFILE=USD,...", parse=_compared, shown_default="none",
    )  # fmt: skip
    no_checks: bool = declare(
        False, "--no-checks", "evaluate no neighbours of the choice, and no other loads"
    )
    jobs: int = declare(
        os.cpu_count() or 1, "--jobs", "processes", metavar="N", low=1, shown_default="one per core"
    )
    cache: str | None = declare(
        None,
        "--cache",
        "folder of saved simulations",
        metavar="FOLDER",
        shown_default="~/.cache/canopy/plan",
    )
    no_cache: bool = declare(False, "--no-cache", "save no simulations")

    def __post_init__(self) -> None:
        declared.check(self)


@dataclass(frozen=True, slots=True)
class Writing:
    """Output."""

    output: Path | None = declare(
        None, "--out", "the plan file for --canopy-plan", metavar="PLAN", parse=out_file
    )
    html: Path | None = declare(
        None, "--html", "the report with figures", metavar="OUT", parse=out_file
    )
    figures: str | None = declare(
        None, "--figures", "the report's figures as PNG", metavar="FOLDER"
    )
    json: Path | None = declare(
        None, "--json-out", "everything as JSON", metavar="OUT", parse=out_file
    )
    disk_path: str | None = declare(
        None, "--disk-path", "the disk store's folder, for the plan file", metavar="FOLDER"
    )
    validation: str | None = declare(
        None, "--validation", "errors that canopy validate found, to print",
        metavar="FILE",
    )  # fmt: skip
