"""The options of ``canopy plan``, each declared once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from canopy_lab.cli.shared import TraceOptions
from canopy_lab.cli.values import out_file, yaml_file
from canopy_lab.plan.choice import Constraint, parse_constraints
from canopy_lab.plan.objective import METRICS, PlanMetric, find_metric
from canopy_lab.plan.request import SearchKeys, split_names
from canopy_lab.plan.space import GROUP, KNOBS, TTL
from canopy_lab.sim.system.config import ROUTINGS
from sglang_canopy import declared
from sglang_canopy.config.server_settings import SGLANG_DEFAULTS
from sglang_canopy.declared import declare, declare_key, keyed
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import AUTO, live_names

_DEFAULTS = SGLANG_DEFAULTS.to_json()


# ---- parsers of options: each raises ``CanopyError`` with a "must be" message ----


def _parse_integers(text: str, separator: str = ",") -> tuple[int, ...]:
    numbers = split_names(text, separator)
    if not all(name.isdecimal() and int(name) >= 1 for name in numbers):
        raise CanopyError(f"must be whole numbers of 1 or more, got {text!r}")
    return tuple(map(int, numbers))


def _parse_ttls(text: str) -> tuple[TTL, ...]:
    ttls: list[TTL] = []
    for name in split_names(text):
        try:
            ttl: TTL = (
                {"none": None, GROUP: GROUP}[name] if name in ("none", GROUP) else float(name)
            )  # type: ignore[assignment]
        except ValueError:
            ttl = -1.0
        if isinstance(ttl, float) and not 0 < ttl < float("inf"):
            raise CanopyError(f"must be none, group or seconds above 0, got {name!r}")
        ttls.append(ttl)
    return tuple(ttls)


def _parse_disks(text: str) -> tuple[str, ...]:
    disks = split_names(text)
    return () if disks == ("none",) else disks


@dataclass(frozen=True, slots=True)
class ProfileOption:
    """Value of ``--profile``."""

    name: str
    gpu_per_hour: float | None = None


def _parse_profile(text: str) -> ProfileOption:
    name, separator, price = text.rpartition("=")
    if not separator:
        return ProfileOption(text)
    try:
        gpu_per_hour = float(price)
    except ValueError:
        gpu_per_hour = -1.0
    if not 0 <= gpu_per_hour < float("inf"):
        raise CanopyError(f"must be PROFILE or PROFILE=USD (per GPU-hour), got {text!r}")
    return ProfileOption(name, gpu_per_hour)


@dataclass(frozen=True, slots=True)
class PolicyOption:
    """Value of ``--policy``; without a name, the policy is advised."""

    name: str | None = None
    config: Mapping[str, Any] | None = None


def _parse_policy(text: str) -> PolicyOption:
    name, separator, body = text.partition("=")
    policy_names = (AUTO, *live_names())
    if name not in policy_names:
        matches = get_close_matches(name, policy_names, n=1)
        hint = f"; did you mean {matches[0]!r}?" if matches else ""
        raise CanopyError(
            f"names an unknown policy {name!r}; choose from: {', '.join(policy_names)}{hint}"
        )
    return PolicyOption(name, declared.json_object(body) if separator else None)


# ---- the options ----


@dataclass(frozen=True, slots=True)
class Reading(TraceOptions):
    """Input."""

    requests: int = declare(
        0, "--requests", "read only the first N requests; 0: all", metavar="N", low=0
    )
    load: float = declare(
        1.0, "--load", "the same requests X times as fast", metavar="X", low=1e-3, high=1000
    )


@dataclass(frozen=True, slots=True)
class Choosing(declared.Checked):
    """Limits and choices."""

    slo: tuple[Constraint, ...] = declare(
        (), "--slo", 'limits, e.g. "p99_ttft<2s"; several with commas', metavar="C",
        parse=lambda text: parse_constraints([text]), shown_default="none",
    )  # fmt: skip
    minimised: PlanMetric = declare(
        METRICS["cost"], "--best", "metric to minimise among the choices within the limits",
        metavar="METRIC", parse=find_metric, shown_default="cost",
    )  # fmt: skip
    policy: PolicyOption = declare(
        PolicyOption(), "--policy", "policy of every tier: a name, or NAME=JSON",
        metavar="NAME", parse=_parse_policy,
        shown_default="what canopy advise finds for this trace and the devices' pools",
    )  # fmt: skip
    prices: str = declare(
        "aws-us-east-1", "--prices", "price list: a name or a file", metavar="LIST"
    )
    disks: tuple[str, ...] | None = declare(
        None, "--disks", "disk classes of the price list; 'none' for no disk", metavar="A,B",
        parse=_parse_disks, shown_default="all",
    )  # fmt: skip
    ttl: tuple[TTL, ...] = declare(
        (None, GROUP), "--ttl",
        "TTLs of the disk to try: none, seconds, or group",
        metavar="A,B", parse=_parse_ttls, shown_default="none,group",
    )  # fmt: skip
    instances: tuple[int, ...] = declare(
        (1,), "--instances", "numbers of servers to try", metavar="N,N", parse=_parse_integers,
        shown_default="1",
    )  # fmt: skip


def _knob_key(name: str, values: tuple[Any, ...] | None, shown_default: str = "") -> Any:
    """Return the key of a knob: one value, or several to try, separated by slashes."""
    knob = next(knob for knob in KNOBS if knob.name == name)
    value_list = f": {', '.join(knob.values)}" if knob.values else ""

    def parse(text: str) -> tuple[Any, ...]:
        if not knob.values:
            return _parse_integers(text, "/")
        tried = split_names(text, "/")
        if not set(tried) <= set(knob.values):
            raise CanopyError(f"{name} must be of {', '.join(knob.values)}, got {text!r}")
        return tried

    shown_default = shown_default or "/".join(map(str, values or ()))
    return declare_key(
        values,
        f"SGLang's, the values to try{value_list}",
        metavar="A/B",
        parse=parse,
        shown_default=shown_default,
    )


def _setting_key(metavar: str = "N") -> Any:
    return declare_key(
        None, "SGLang's, for the simulation and the server's configuration", metavar=metavar
    )


@dataclass(frozen=True, slots=True)
class ServerKeys(declared.Checked):
    """Settings of the servers: the keys of ``--server``."""

    page_size: tuple[int, ...] = _knob_key("page_size", (1, 64))
    prefetch_policy: tuple[str, ...] = _knob_key("prefetch_policy", ("timeout", "wait_complete"))
    write_policy: tuple[str, ...] | None = _knob_key(
        "write_policy",
        None,
        f"write_back if the policy is auto, else {_DEFAULTS['hicache_write_policy']}",
    )
    schedule_policy: tuple[str, ...] = _knob_key("schedule_policy", (_DEFAULTS["schedule_policy"],))
    chunked_prefill_size: tuple[int, ...] | None = _knob_key(
        "chunked_prefill_size", None, "SGLang's for gpu_memory_gib"
    )
    max_running_requests: int | None = _setting_key()
    max_prefill_tokens: int | None = _setting_key()
    schedule_conservativeness: float | None = _setting_key("X")
    mem_fraction_static: float | None = _setting_key("X")
    prefetch_threshold: int | None = _setting_key()
    prefetch_timeout_base: float | None = _setting_key("X")
    prefetch_timeout_per_ki_token: float | None = _setting_key("X")
    gpus: int | None = declare_key(
        None, "GPUs paid for per server", metavar="N", low=1,
        shown_default="the profile's, else the price list's",
    )  # fmt: skip
    gpu_memory_gib: float = declare_key(80.0, "memory of one GPU", metavar="G", low=0)
    block_tokens: int = declare_key(
        64, "block_tokens of its disk store, for group TTLs from its log", metavar="N", low=1
    )


@dataclass(frozen=True, slots=True)
class EngineOptions(declared.Checked):
    """The simulated servers."""

    profile: ProfileOption = declare(
        ProfileOption("llama-3.1-8b-h100"), "--profile",
        "engine profile: a name or a file; with =USD, that price of a GPU-hour",
        metavar="NAME[=USD]", parse=_parse_profile, shown_default="llama-3.1-8b-h100",
    )  # fmt: skip
    device_tokens: int | None = declare(
        None, "--device-tokens", "KV pool of one device, in tokens", metavar="N", low=1,
        shown_default="the profile's, or 40 GiB of KV",
    )  # fmt: skip
    routing: str = declare("prefix-aware", "--routing", "how requests are spread", choices=ROUTINGS)
    server: ServerKeys = declare(
        ServerKeys(), "--server", "settings of the servers", metavar="KEY=VALUE,...",
        parse=keyed(ServerKeys, head=""), shown_default="",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Searching(declared.Checked):
    """Search."""

    search: SearchKeys = declare(
        SearchKeys(), "--search", "limits of the search and its report", metavar="KEY=VALUE,...",
        parse=keyed(SearchKeys, head=""), shown_default="",
    )  # fmt: skip
    jobs: int = declare(
        os.cpu_count() or 1, "--jobs", "processes", metavar="N", low=1, shown_default="one per core"
    )


@dataclass(frozen=True, slots=True)
class Writing:
    """Output."""

    output: Path | None = declare(
        None,
        "--out",
        "the server's configuration, for SGLang's --config",
        metavar="PLAN.yaml",
        parse=yaml_file,
    )
    html: Path | None = declare(
        None, "--html", "the report with figures", metavar="OUT", parse=out_file
    )
    json: Path | None = declare(
        None, "--json-out", "everything as JSON", metavar="OUT", parse=out_file
    )
    disk_path: str | None = declare(
        None, "--disk-path", "the disk store's folder, for the configuration", metavar="FOLDER"
    )
