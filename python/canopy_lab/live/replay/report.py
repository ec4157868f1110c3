"""Compare replays: hit rate and TTFT by category, one column per run.

python -m canopy_lab.live.replay.report lru.json wa.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from canopy_lab.report.table import text_table
from sglang_canopy.errors import CanopyError

GROUPINGS = ("category", "turn", "stop")


def results_table(results: Sequence[dict[str, Any]]) -> str:
    """Return a table by category, turn and stop reason, where results have several of them."""
    groupings = [g for g in GROUPINGS if any(len(r[f"by_{g}"]) > 1 for r in results)]
    head = ["requests", "prompt tokens"]
    head += [f"hit rate, {r['label']}" for r in results]
    head += [f"TTFT mean / P95 ms, {r['label']}" for r in results]
    rows = [["all", *_cells([r["overall"] for r in results])]]
    for g in groupings:
        names = sorted({name for r in results for name in r[f"by_{g}"]})
        for name in names:
            groups = [r[f"by_{g}"].get(name) for r in results]
            rows.append([f"{g} {name}", *_cells(groups)])
    return "\n".join([text_table(["", *head], rows), "", *(_footnote(r) for r in results)])


def latency_table(results: Sequence[dict[str, Any]]) -> str:
    """Return a table of TTFT from due times, one row per run and rate.

    Columns also give sessions, and the mean of the shortest and the longest tenth of the prompts.
    Empty if no request succeeded.
    """
    head = (
        "from when due", "TTFT mean s", "P50", "P95", "P99", "max", "shortest tenth", "longest tenth",
        "sessions/h", "session P99 s", "SLO",
    )  # fmt: skip
    rows: list[list[str]] = []
    notes = []
    for result in results:
        for run in result.get("rates") or [result]:
            latency = run.get("latency")
            if latency is None:
                continue
            rate = "" if "rate" not in run else f", {run['rate']:g}"
            ttft, deciles = latency["ttft_s"], latency["deciles"]
            numbers = [ttft[statistic] for statistic in ("mean", "p50", "p95", "p99", "max")]
            numbers += [deciles[i]["ttft_s"]["mean"] for i in (0, -1)]
            slo_text = {None: "-", True: "met", False: "missed"}[run["meets_slo"]]
            rows.append(
                [result["label"] + rate, *(f"{statistic:.3f}" for statistic in numbers),
                 f"{latency['sessions_per_hour']:.1f}", f"{latency['session_s']['p99']:.1f}", slo_text]
            )  # fmt: skip
        if "goodput_rate" in result:
            unit = "sessions/h" if result["options"]["closed_loop"] else "requests/s"
            notes.append(f"{result['label']}: goodput {result['goodput_rate']:g} {unit} with "
                         f"{result['slo']}")  # fmt: skip
    if not rows:
        return ""
    return "\n".join([text_table(head, rows), *(["", *notes] if notes else [])])


def _cells(groups: Sequence[dict[str, Any] | None]) -> list[str]:
    any_group = next(grouping for grouping in groups if grouping is not None)
    cells = [str(any_group["requests"]), str(any_group["prompt_tokens"])]
    for group in groups:
        rate = None if group is None else group["hit_rate"]
        cells.append("-" if rate is None else f"{rate:.1%}")
    for group in groups:
        ttft = None if group is None else group["ttft_ms"]
        cells.append("-" if ttft is None else f"{ttft['mean']:.0f} / {ttft['p95']:.0f}")
    return cells


def _footnote(result: dict[str, Any]) -> str:
    overall = result["overall"]
    tiers = overall["hit_rate_by_tier"] or {}
    parts = [f"{tier} {rate:.1%}" for tier, rate in tiers.items() if rate]
    queued = overall["queued_ttft_ms"] or {}
    return (
        f"{result['label']}: {result['completed']} of {result['requests']} requests in "
        f"{result['duration_s']:.0f} s"
        + (f"; hits from {', '.join(parts)}" if parts else "")
        + (f"; queued TTFT P50 {queued['p50']:.0f} P99 {queued['p99']:.0f} ms" if queued else "")
        + ("" if result["outputs_forced"] else "; outputs not forced")
    )


def load_result(path: str) -> dict[str, Any]:
    """Load a result that the benchmark wrote. Raises ``CanopyError``."""
    try:
        result = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise CanopyError(f"cannot read result {path!r}: {error}") from None
    if not isinstance(result, dict) or "overall" not in result:
        raise CanopyError(f"{path!r} is no result of python -m sglang_canopy.bench_serving")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m canopy_lab.live.replay.report", description=__doc__
    )
    parser.add_argument("results", nargs="+", metavar="RESULT.json")
    args = parser.parse_args(argv)
    try:
        results = [load_result(path) for path in args.results]
        print(results_table(results))
        print()
        print(latency_table(results))
    except CanopyError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
