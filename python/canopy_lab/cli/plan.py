"""``canopy plan``: recommend DRAM and disk for a workload."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from itertools import compress
from typing import Any

from canopy_lab.cli.plan_command import PlanCommand, check_options, with_advised_policy
from canopy_lab.cli.plan_options import Choosing, EngineOptions, Reading, Searching, Writing
from canopy_lab.cli.shared import Bar
from canopy_lab.cli.values import write_json
from canopy_lab.plan.plan_page import make_page
from canopy_lab.plan.planner import CapacityPlan, make_plan, to_json
from canopy_lab.plan.server_plan import server_plan, write_config
from canopy_lab.plan.text import plan_text
from canopy_lab.plan.worker import PlanInputs, at_load
from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.system.reservation import CLIP_OUTPUT_TOKENS
from canopy_lab.trace.record import TraceRequest
from canopy_lab.trace.sglang_log import logs_tokens, read_as_server
from sglang_canopy.errors import CanopyError
from sglang_canopy.ttl.table import SERVER_HASH, TRACE_HASH

FEW_REQUESTS = 500
"""Minimum requests for a meaningful P99."""
OPTIONS = (Reading, Choosing, EngineOptions, Searching, Writing)


def run(*options: Any) -> int:
    """Plan, print, and write the requested files. ``options``: one object per ``OPTIONS`` class.

    Returns 1 if no configuration meets the limits.
    """
    command = check_options(*options)
    plan, inputs, origin = plan_trace(command, *read_requests(command))
    print(plan_text(plan, inputs.prices.currency))
    print("\n".join(remarks(command, inputs, origin)))
    write_outputs(command, plan, inputs, origin)
    return 0 if plan.choice.is_feasible else 1


def plan_trace(
    command: PlanCommand, trace: CompactTrace, id_hash: str
) -> tuple[CapacityPlan, PlanInputs, dict[str, Any]]:
    """Plan for the trace that ``read_requests`` returned."""
    logged_requests, trace = len(trace), _requests_that_fit(command, trace)
    command, policy_reason = with_advised_policy(command, trace)
    inputs = PlanInputs(trace, command.engine, command.prices, command.policy_configs, id_hash)
    with Bar(unit="run", desc="planning", disable=None) as bar:
        plan = make_plan(command.request, inputs, jobs=command.searching.jobs, progress=bar.show)
    origin = {
        "trace": command.reading.trace,
        "format": command.format,
        "requests": len(inputs.trace),
        **({"too_long": logged_requests - len(trace)} if len(trace) < logged_requests else {}),
        "load": command.reading.load,
        "profile": command.profile.name,
        "profile_source": command.profile.source,
        "prices": inputs.prices.name,
        "example_prices": inputs.prices.is_example,
        "price_sources": list(inputs.prices.sources),
        "device_tokens": command.engine.device_tokens,
        "routing": command.engine.routing,
        "policy": policy_reason,
        "date": datetime.date.today().isoformat(),
    }
    return plan, inputs, origin


def read_requests(command: PlanCommand) -> tuple[CompactTrace, str]:
    """Return the requests, and the origin of their block ids. Raises ``CanopyError`` if empty."""
    args, id_hash = command.reading, TRACE_HASH
    source: Iterable[TraceRequest]
    if command.format == "sglang" and find_spec("xxhash") and logs_tokens(args.trace):
        id_hash = SERVER_HASH
        source = read_as_server(
            args.trace,
            block_tokens=command.engine_options.server.block_tokens,
            skip_bad=args.skip_bad,
        )
    else:
        source = args.read()
    if args.requests:
        source = (r for _, r in zip(range(args.requests), source))
    trace = CompactTrace(at_load(source, args.load))
    if not len(trace):
        raise CanopyError(f"{command.reading.trace!r} has no requests; give a trace with requests")
    return trace, id_hash


def _requests_that_fit(command: PlanCommand, trace: CompactTrace) -> CompactTrace:
    """Return the requests that fit a device of this plan, with the tokens it reserves for their
    answers. The device would refuse the rest. Raises ``CanopyError`` if most do not fit."""
    page, pool = max(command.request.choices["page_size"]), command.engine.device_tokens
    is_fitting = [
        max(r.input_tokens, 1) + min(max(r.output_tokens, 1), CLIP_OUTPUT_TOKENS) + page < pool
        for r in trace
    ]
    if sum(is_fitting) < len(is_fitting) / 2:
        raise CanopyError(
            f"{len(is_fitting) - sum(is_fitting)} of {len(is_fitting)} requests need more device memory (prompt and "
            f"output) than there is, device_tokens is {pool}; give more as --device-tokens"
        )
    return trace if all(is_fitting) else CompactTrace(compress(trace, is_fitting))


def remarks(command: PlanCommand, inputs: PlanInputs, origin: Mapping[str, Any]) -> list[str]:
    """Return the reason for the policy, and caveats, to print with the plan."""
    lines = [
        origin["policy"],
        "",
        f"{len(inputs.trace)} requests on {command.profile.name} ({command.profile.source}); device pool "
        f"{command.engine.device_tokens} tokens; routing {command.engine.routing}.",
    ]
    request_count, left_out = len(inputs.trace), origin.get("too_long", 0)
    if left_out:
        lines.append(
            f"{left_out} of {request_count + left_out} requests need more than the "
            f"{command.engine.device_tokens} tokens of the device's KV pool and are left out: this "
            "server would refuse them."
        )
    if request_count < FEW_REQUESTS:
        lines.append(
            f"These are few requests: a P99 is the time of the slowest {math.ceil(request_count / 100)}. "
            "Plan from a longer trace."
        )
    if request_count > 1 and inputs.trace[0].time_s == inputs.trace[request_count - 1].time_s:
        lines.append(
            "The requests all have the same time: this is a plan for one burst, at any load."
        )
    if not command.engine.is_pool_known:
        lines.append(
            "The device's KV pool was assumed, and the plan file does not set it: give "
            "--device-tokens (max_total_num_tokens in a server's log)."
        )
    lines.append(
        "The error of these predictions on your traffic is unknown; canopy validate measures it."
    )
    if inputs.prices.is_example:
        lines.append(
            f"Prices: {inputs.prices.name}, an example to replace by your own (docs/reference/price-list.md)."
        )
    return lines


def write_outputs(
    command: PlanCommand, plan: CapacityPlan, inputs: PlanInputs, origin: Mapping[str, Any]
) -> None:
    """Write the files of ``--json-out``, ``--html`` and ``--out``."""
    args = command.writing
    if args.json:
        write_json(args.json, to_json(plan, origin), allow_nan=False)
    if args.html:
        make_page(plan, origin, inputs.prices.currency).write(args.html)
    if args.output:
        if not plan.choice.is_feasible:
            print(f"{args.output} is not written: no configuration meets the limits.")
            return
        origin = {k: v for k, v in origin.items() if k != "price_sources"}
        config, notes = server_plan(plan.choice.row, inputs, origin, args.disk_path)
        write_config(args.output, config, {"made by": "canopy plan", **notes})
        print(f"Start a server with it: --config {args.output}")
