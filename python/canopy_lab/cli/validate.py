"""``canopy validate``: compare a plan's prediction with its server's log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from canopy_lab.cli.values import above_zero, out_file, write_json
from canopy_lab.plan.disk_class import MIB
from canopy_lab.plan.server_plan import ServerFlags, read_config
from canopy_lab.plan.validation import HITS, TTFTS, Validation, recalibrate, system_config, validate
from canopy_lab.report.table import text_table
from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.system.config import SystemConfig
from canopy_lab.sim.system.engine_profile import Bandwidth, EngineProfile, load_profile
from canopy_lab.trace.open import last_hours
from canopy_lab.trace.record import TraceRequest
from canopy_lab.trace.served_log import CACHE_FLAG, LOG_FLAGS, read_served
from canopy_lab.trace.sglang_log import last_flush, pool_tokens, read_as_server
from sglang_canopy import declared
from sglang_canopy.declared import declare

FILE_FORMAT = "canopy-validation"
FEW_REQUESTS = 30


@dataclass(frozen=True, slots=True)
class Options(declared.Checked):
    log: str = declare(None, "LOG", f"the server's log, written with {LOG_FLAGS} {CACHE_FLAG}")
    plan: str = declare(
        None,
        "--plan",
        "the file of SGLang's --config that the server runs",
        metavar="FILE",
        required=True,
    )
    profile: str = declare(
        None, "--profile", "engine profile that the plan was made with", metavar="NAME",
        required=True,
    )  # fmt: skip
    last_hours: float = declare(
        1.0, "--last-hours", "compare the last hours of the log", metavar="H"
    )
    device_tokens: int | None = declare(
        None, "--device-tokens", "KV pool of the server, in tokens", metavar="N", low=1,
        shown_default="the plan's, else the log's",
    )  # fmt: skip
    disk_mib_s: float | None = declare(
        None, "--disk-mib-per-s", "the disk's bandwidth, if not the profile's", metavar="X",
        parse=above_zero,
    )  # fmt: skip
    skip_bad: int = declare(0, "--skip-bad", "skip up to N broken lines", metavar="N", low=0)
    recalibrate: Path | None = declare(
        None, "--recalibrate", "write a profile whose mean TTFT is right", metavar="PROFILE",
        parse=out_file,
    )  # fmt: skip
    json: Path | None = declare(
        None, "--json-out", "write the errors as JSON", metavar="OUT",
        parse=out_file,
    )  # fmt: skip


OPTIONS = (Options,)


def run(args: Options) -> None:
    plan, profile = read_config(args.plan), load_profile(args.profile)
    config = _make_system(plan, profile, args)
    trace = CompactTrace(last_hours(_read_requests(args.log, plan, args.skip_bad), args.last_hours))
    served = read_served(args.log)
    validation = validate(trace, served, config, profile)
    print(f"{validation.requests} requests of the last {args.last_hours:g} h, {profile.name}:")
    print(errors_table(validation))
    if validation.requests < FEW_REQUESTS:
        print("These are few requests, and one alone may decide: validate more of the log.")
    report = {"format": FILE_FORMAT, "version": 1, "log": args.log, "profile": profile.name}
    report |= validation.to_json()
    if args.recalibrate:
        factor, rescaled, held_out = recalibrate(trace, served, config, profile)
        print(f"\nStep times x {factor:.3g}, found on the first half; on the second half then:")
        print(errors_table(held_out))
        write_json(args.recalibrate, rescaled.to_json())
        report["recalibrated"] = {"factor": factor, **held_out.to_json()}
    if args.json:
        write_json(args.json, report, allow_nan=False)


def _read_requests(log: str, plan: ServerFlags, skip_bad: int = 0) -> Iterator[TraceRequest]:
    """Yield requests since the last flush: the simulation also starts with an empty cache."""
    flush_line = last_flush(log)
    if flush_line:
        print(
            f"{log}: the cache was flushed or the server started (line {flush_line}); earlier requests are left out"
        )
    for request in read_as_server(log, block_tokens=_block_tokens(plan), skip_bad=skip_bad):
        if request.line > flush_line:
            yield request


def _make_system(plan: ServerFlags, profile: EngineProfile, args: Options) -> SystemConfig:
    mib_per_s, tokens = args.disk_mib_s, args.device_tokens
    disk = None if mib_per_s is None else Bandwidth(mib_per_s * MIB, mib_per_s * MIB)
    if tokens is None and not plan.get("max-total-tokens"):
        logged = pool_tokens(args.log)
        # Several DP ranks have separate caches.
        tokens = logged[0] if logged and logged[1] == 1 else None
    return system_config(plan, profile, device_tokens=tokens, disk=disk)


def _name_and_unit(name: str) -> tuple[str, str]:
    """Return a metric's readable name, and its unit."""
    if name in HITS:
        return name.replace("_", " "), ""
    if name in TTFTS:
        return name.removesuffix("_s").replace("_", " "), "s"
    return "throughput", "tokens/s"


def errors_table(validation: Validation) -> str:
    """Format prediction, measurement and error of each metric."""
    rows = []
    for name in validation.to_json()["errors"]:
        scale, unit, digits = (100, " %", 2) if name in HITS else (1, "", 4)
        error = f"{100 * validation.error(name):+.1f} {'points' if name in HITS else '%'}"
        rows.append(
            [", ".join(filter(None, _name_and_unit(name))),
             *(f"{scale * values[name]:.{digits}f}{unit}" for values in (validation.predicted, validation.measured)), error]
        )  # fmt: skip
    return text_table(("", "predicted", "seen", "error"), rows)


def _block_tokens(plan: ServerFlags) -> int:
    """Return the tokens per simulated block: the plan's group blocks, else a page."""
    ttl_table = plan.get("canopy-ttl", {})
    if ttl_table.get("groups"):
        return int(ttl_table.get("block_tokens", 64))
    return max(plan.get("page-size") or 1, 16)
