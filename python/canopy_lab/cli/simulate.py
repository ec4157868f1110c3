"""``canopy simulate``: hit ratios of policies on a trace, without a server."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from canopy_lab.cli.overlay_arguments import add_overlay_arguments
from canopy_lab.report.sweep import sweep_notes, sweep_table
from canopy_lab.report.table import bytes_text
from canopy_lab.sim.model import load_model_shape
from canopy_lab.sim.requests import Hints
from canopy_lab.sim.sweep import PolicyArm, Sweep, SweepPlan, run_sweep
from sglang_canopy.errors import CanopyError

BOUND = "belady"
Number = TypeVar("Number", int, float)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``canopy simulate``."""
    add = parser.add_argument
    add("--trace", required=True, metavar="PATH", help="trace file, or archive of conversations")
    add(
        "--format",
        required=True,
        help="trace format: bailian, mooncake, agentic, azure or sglang (a server's own log)",
    )
    add(
        "--policy",
        required=True,
        metavar="A,B",
        help="policies to compare; NAME:TAG runs one twice with other options",
    )
    add(
        "--capacity",
        required=True,
        metavar="C,C",
        help="sizes of the cache in blocks; below 1, as a fraction of the trace's distinct blocks",
    )
    add(
        "--seed",
        default="0",
        metavar="K,K",
        help="seeds of overlays, placebo and hints (default 0)",
    )
    add(
        "--policy-config",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help='options of a policy, e.g. wa=\'{"model":"exponential"}\'; may be given several times',
    )
    add("--json", metavar="OUT", help="write the rows as a JSON list")
    add("--figure", metavar="OUT", help="draw hit ratio against capacity, with the hindsight bound")
    add("--skip-bad", type=int, default=0, metavar="N", help="pass over N broken lines")
    add(
        "--placebo",
        action="store_true",
        help="also run policies that read labels with the labels shuffled among the requests",
    )
    add(
        "--hints",
        metavar="SHARE,ACCURACY",
        help="that share of the clients says whether and when a conversation continues, right with that probability",
    )
    add_overlay_arguments(add)
    add(
        "--tel-threshold-tokens",
        type=float,
        metavar="N",
        help="uncached tokens a request may have (default: LRU's P90 at the same capacity)",
    )
    add("--slo-ms", type=float, metavar="MS", help="the same as a TTFT target; needs --ttft-model")
    add("--ttft-model", metavar="A,B", help="TTFT = A ms per uncached token + B ms")
    add(
        "--model",
        metavar="NAME",
        help="preset or Hugging Face config.json, for KV bytes and prefill FLOPs saved",
    )
    add(
        "--whole-nodes",
        action="store_true",
        help="evict whole nodes as SGLang does, not only what is needed",
    )
    add(
        "--optional-caching",
        action="store_true",
        help="a request need not be cached, as no server can have it; the bound is higher then",
    )
    add("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes")


def run(args: argparse.Namespace) -> int:
    """Simulate, print the table, write what was asked for."""
    plan = make_plan(args)
    asked = plan
    if args.figure and not any(choice.label == BOUND for choice in plan.choices):
        plan = replace(plan, choices=(*plan.choices, PolicyArm(BOUND)))
    for out in (args.json, args.figure):
        if out and not Path(out).resolve().parent.is_dir():
            raise CanopyError(f"cannot write {out!r}: its folder does not exist; make it first")
    with tqdm(total=None, unit="run", desc="reading", disable=None) as bar:

        def progress(done: int, tasks: int, what: str) -> None:
            bar.total = tasks or None
            bar.set_description(what or "simulating", refresh=False)
            bar.update(done - bar.n)
            bar.refresh()

        sweep = run_sweep(plan, jobs=args.jobs, progress=progress)
    print(summary(sweep))
    if args.json:
        labels = {choice.label for choice in asked.choices}
        rows = [row for row in sweep.rows if row["policy"] in labels]
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    if args.figure:
        draw(args.figure, plan, sweep)
    return 0


def make_plan(args: argparse.Namespace) -> SweepPlan:
    """Check every option. Raises ``CanopyError`` naming the first that is wrong."""
    configs = dict(_config(text) for text in args.policy_config)
    labels = [label.strip() for label in args.policy.split(",") if label.strip()]
    if len(set(labels)) < len(labels) or not labels:
        raise CanopyError(f"--policy must name each policy once, got {args.policy!r}")
    for label in configs:
        if label not in labels:
            raise CanopyError(f"--policy-config is for {label!r}, which --policy does not name")
    if args.conversations is not None and args.format != "agentic":
        raise CanopyError(f"--conversations needs --format agentic, got {args.format!r}")
    if args.jobs < 1:
        raise CanopyError(f"--jobs must be 1 or more, got {args.jobs}")
    ttft_model, threshold, slo_ms = _tail(args)
    return SweepPlan(
        path=args.trace,
        format=args.format,
        choices=tuple(PolicyArm(label, configs.get(label, {})) for label in labels),
        capacities=tuple(_numbers("--capacity", args.capacity, _capacity)),
        seeds=tuple(_numbers("--seed", args.seed, int)),
        skip_bad=args.skip_bad,
        conversations=args.conversations,
        window_s=args.window_s,
        own_prefixes=args.own_prefixes,
        placebo=args.placebo,
        hints=_hints(args.hints),
        threshold_tokens=threshold,
        slo_ms=slo_ms,
        ttft_model=ttft_model,
        model=load_model_shape(args.model) if args.model else None,
        whole_nodes=args.whole_nodes,
        optional_caching=args.optional_caching,
    )


def summary(sweep: Sweep) -> str:
    """What is printed: the table and what is in it."""
    memory = f"peak memory {bytes_text(sweep.peak_memory_bytes)} in the largest process"
    return "\n".join([sweep_table(sweep.rows), "", *sweep_notes(sweep.rows), memory])


def draw(path: str, plan: SweepPlan, sweep: Sweep) -> None:
    """Write the figure."""
    from canopy_lab.report.hit_ratio import hit_ratio_figure

    curves, ideals = [], []
    for curve in sweep.lru:
        capacities = np.arange(len(curve.block_hits_at)) / curve.distinct_blocks
        curves.append((capacities, curve.block_hits_at / curve.blocks))
        ideals.append(curve.block_hits_at[-1] / curve.blocks)
    first = sweep.traces[0]
    title = f"{Path(plan.path).name}: {first.requests:,} requests"
    if plan.conversations is not None:
        title = f"{plan.conversations} conversations of {Path(plan.path).name}"
        title += f", {len(plan.seeds)} seeds" if len(plan.seeds) > 1 else ""
    hit_ratio_figure(path, sweep.rows, curves, title=title, ideal=float(np.mean(ideals)))


def _config(text: str) -> tuple[str, Mapping[str, Any]]:
    name, separator, body = text.partition("=")
    try:
        config = json.loads(body)
    except ValueError:
        config = None
    if not separator or not isinstance(config, dict):
        raise CanopyError(
            f"--policy-config must be NAME=JSON object, got {text!r}; "
            """for example wa='{"model":"exponential"}'"""
        )
    return name.strip(), config


def _numbers(option: str, text: str, parse: Callable[[str], Number]) -> list[Number]:
    try:
        numbers = [parse(part) for part in text.split(",")]
    except ValueError as error:
        raise CanopyError(f"{option} must be numbers separated by commas: {error}") from None
    if len(set(numbers)) < len(numbers):
        raise CanopyError(f"{option} gives a number twice: {text!r}")
    return numbers


def _capacity(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf or (value >= 1 and value != int(value)):
        raise ValueError(f"{text!r} is neither a fraction below 1 nor a whole number of blocks")
    return value


def _hints(text: str | None) -> Hints | None:
    if text is None:
        return None
    values = _pair("--hints", text)
    return Hints(share=values[0], accuracy=values[1])


def _pair(option: str, text: str) -> tuple[float, float]:
    parts = text.split(",")
    try:
        first, second = (float(part) for part in parts)
    except ValueError:
        raise CanopyError(f"{option} must be two numbers A,B, got {text!r}") from None
    return first, second


def _tail(
    args: argparse.Namespace,
) -> tuple[tuple[float, float] | None, float | None, float | None]:
    """(TTFT model in s, threshold in tokens, SLO in ms) from the options."""
    model = None
    if args.ttft_model is not None:
        alpha_ms, beta_ms = _pair("--ttft-model", args.ttft_model)
        if not (alpha_ms > 0 and beta_ms >= 0):
            raise CanopyError(f"--ttft-model needs A > 0 and B >= 0, got {args.ttft_model!r}")
        model = (alpha_ms / 1000, beta_ms / 1000)
    if args.slo_ms is None:
        threshold = args.tel_threshold_tokens
        if threshold is not None and not threshold >= 0:
            raise CanopyError(f"--tel-threshold-tokens must be 0 or above, got {threshold}")
        return model, threshold, None
    if args.tel_threshold_tokens is not None:
        raise CanopyError("give --slo-ms or --tel-threshold-tokens, not both")
    if model is None:
        raise CanopyError("--slo-ms needs --ttft-model A,B to be turned into tokens")
    threshold = (args.slo_ms / 1000 - model[1]) / model[0]
    if threshold < 0:
        raise CanopyError(f"--slo-ms {args.slo_ms} is below what --ttft-model says for 0 tokens")
    return model, threshold, args.slo_ms
