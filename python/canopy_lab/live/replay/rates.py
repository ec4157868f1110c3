"""Replay one trace at several rates, and find the highest rate that meets a target."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from canopy_lab.live.replay import options
from canopy_lab.live.replay.replay_run import Replay


def replay_all(upstream: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Return a replay's result; with ``--rates`` the last replay's, and all in ``rates``.

    The lowest rate runs first. SGLang's and vLLM's caches are emptied before each. Raises
    ``CanopyError``.
    """
    if not args.rates:
        return Replay(upstream, args)()
    options.check(args)
    results = []
    for rate in args.rates:
        rate_args = argparse.Namespace(**vars(args))
        rate_args.flush_cache = args.flush_cache or args.backend.startswith(("sglang", "vllm"))
        results.append(Replay(upstream, rate_args, rate)())
    summary = {**results[-1], "rates": [report_part(result) for result in results]}
    if args.slo is not None:
        summary["goodput_rate"] = goodput_rate(summary["rates"])
    if args.output_file:
        Path(args.output_file).write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def report_part(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a rate's result that is kept."""
    keys = ("completed", "errors", "duration_s", "throughput", "latency", "slo", "meets_slo")
    return {
        "rate": result["options"]["rate"],
        **{key: result[key] for key in keys},
        "overall": result["overall"],
    }


def goodput_rate(results: Sequence[Mapping[str, Any]]) -> float:
    """Return the highest rate up to which every rate met the target; 0 if the lowest missed."""
    goodput = 0.0
    for result in sorted(results, key=lambda result: result["rate"]):
        if not result["meets_slo"]:
            break
        goodput = result["rate"]
    return goodput
