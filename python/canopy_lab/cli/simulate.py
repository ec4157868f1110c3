"""``canopy simulate``: hit ratios of policies on a trace, without a server."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canopy_lab.cli.shared import Bar, TraceOptions
from canopy_lab.cli.values import list_parser, out_file, write_json
from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.requests import SimulatedHints
from canopy_lab.sim.sweep import PolicyArm, SweepPlan, run_sweep
from canopy_lab.sim.sweep_table import sweep_notes, sweep_table
from sglang_canopy import declared
from sglang_canopy.declared import declare
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import SGLANGS_LRU


def _parse_capacity(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf or (value >= 1 and value != int(value)):
        raise ValueError(text)
    return value


def _parse_hints(text: str) -> SimulatedHints:
    try:
        share, accuracy = (float(part) for part in text.split(","))
    except ValueError:
        raise CanopyError(f"must be two numbers, got {text!r}") from None
    return SimulatedHints(share=share, accuracy=accuracy)


def _parse_config(text: str) -> tuple[str, Mapping[str, Any]]:
    name, separator, body = text.partition("=")
    if not separator:
        raise CanopyError(
            f'must be NAME=JSON, such as wa=\'{{"model":"exponential"}}\', got {text!r}'
        )
    return name.strip(), declared.json_object(body)


_CAPACITY_NOUN = "fractions of the distinct blocks below 1 or whole numbers of blocks"


@dataclass(frozen=True, slots=True)
class Options(TraceOptions):
    policy: tuple[str, ...] = declare(
        (), "--policy", "policies to compare; lru is SGLang's own",
        metavar="A,B", parse=list_parser(str, "names separated by commas"), required=True,
    )  # fmt: skip
    capacity: tuple[float, ...] = declare(
        (), "--capacity", "sizes of the cache in blocks; below 1, of the trace's distinct blocks",
        metavar="C,C", parse=list_parser(_parse_capacity, _CAPACITY_NOUN), required=True,
    )  # fmt: skip
    seed: tuple[int, ...] = declare(
        (0,), "--seed", "seeds of placebo and hints", metavar="K,K",
        parse=list_parser(int, "whole numbers"), shown_default="0",
    )  # fmt: skip
    policy_config: tuple[tuple[str, Mapping[str, Any]], ...] = declare(
        (), "--policy-config", "options of a policy; may be given several times",
        metavar="NAME=JSON", parse=_parse_config, repeated=True, shown_default="",
    )  # fmt: skip
    placebo: bool = declare(
        False,
        "--placebo",
        "also run policies that learn with another request's label on each request",
    )
    hints: SimulatedHints | None = declare(
        None, "--hints",
        "clients that say whether and when a conversation continues, and how often they are right", metavar="SHARE,ACCURACY", parse=_parse_hints,
    )  # fmt: skip
    json: Path | None = declare(
        None, "--json-out", "write the rows as a JSON list", metavar="OUT", parse=out_file
    )
    jobs: int = declare(
        os.cpu_count() or 1, "--jobs", "processes", metavar="N", low=1, shown_default="one per core"
    )

    def __post_init__(self) -> None:
        declared.check(self)
        for name, _ in self.policy_config:
            if name not in self.policy:
                raise CanopyError(f"--policy-config is for {name!r}, which --policy does not name")


OPTIONS = (Options,)


def run(options: Options) -> None:
    configs = dict(options.policy_config)
    plan = SweepPlan(
        arms=tuple(
            PolicyArm(name, configs.get(name, {}), name == SGLANGS_LRU) for name in options.policy
        ),
        capacities=options.capacity,
        seeds=options.seed,
        placebo=options.placebo,
        hints=options.hints,
    )
    trace = CompactTrace(options.read())
    with Bar(unit="run", desc="simulating", disable=None) as bar:
        rows = run_sweep(plan, trace, jobs=options.jobs, progress=bar.show)
    print("\n".join([sweep_table(rows), "", *sweep_notes(rows)]))
    if options.json:
        source = {"trace": options.trace, "format": options.detected_format}
        write_json(options.json, [{**source, **row} for row in rows])
