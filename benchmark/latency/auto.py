"""``--radix-eviction auto`` beside the best that SGLang's own settings can do, cell by cell.

    python benchmark/latency/simulated.py --data DATA run --arms auto,auto-host
    python benchmark/latency/auto.py > benchmark/latency/results/auto.md

Reads the runs of simulated.py. A cell is a workload, a load and a size of the host tier; its best
static setting is the one of SGLang's in STATIC with the least mean TTFT there, found by trying each,
which no operator can. Figures are geometric means over profiles and seeds, in percent.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from simulated import LOADS, WORKLOADS, Part, fingerprint, name, parts

STATIC = {
    0.0: ("sglang", "hrrn", "shortest"),
    2.0: ("sglang-host",),
}
"""SGLang's own settings, by the size of the host tier; the first are its defaults."""
OURS = {0.0: ("auto", "wa", "order"), 2.0: ("auto-host", "wa-host")}
"""What is held against them."""
Runs = Mapping[str, Sequence[Mapping[str, float]]]
"""Arm -> a row for each profile and seed."""


def cell(workload: str, load: float, host: float) -> Runs:
    """The runs of those profiles and seeds that every arm has."""
    wanted = STATIC[host] + OURS[host]
    found: dict[str, list[Mapping[str, float]]] = {key: [] for key in wanted}
    for part in parts():
        if (part.workload, part.host) == (workload, host) and part.path.exists():
            rows = rows_of(part, load)
            if all(key in rows for key in (*STATIC[host], OURS[host][0])):
                for key, row in rows.items():
                    if key in found:
                        found[key].append(row)
    return found


def rows_of(part: Part, load: float) -> dict[str, Any]:
    """The arms of one part that are up to date."""
    runs = json.loads(part.path.read_text())["runs"]
    rows = {arm.key: (runs.get(name(arm, load)), fingerprint(arm)) for arm in part.arms}
    return {key: row for key, (row, made) in rows.items() if row and row["arm"] == made}


def ratio(runs: Runs, arm: str, of: str, beside: str) -> float:
    """One arm's figure as a multiple of another's."""
    pairs = zip(runs[arm], runs[beside])
    return statistics.geometric_mean(row[of] / other[of] for row, other in pairs)


def percent(value: float) -> str:
    return f"{100 * (value - 1):+.0f}"


def tables() -> Iterator[str]:
    for host, (default, *_) in STATIC.items():
        ours = OURS[host]
        yield f"## {'No host tier' if not host else f'A host tier of {host:g} x the device'}\n"
        yield (
            f"| workload | load | {default}, mean s | best static | mean | `{ours[0]}`: mean "
            "| P99 | max | beside the best | "
            + " | ".join(f"`{arm}`" for arm in ours[1:])
            + " | runs |"
        )
        yield "|---|---:|---:|---|" + "---:|" * (6 + len(ours) - 1)
        for workload in WORKLOADS:
            for load in LOADS:
                runs = cell(workload, load, host)
                if runs[ours[0]]:
                    yield row(workload, load, host, runs)
        yield ""


def row(workload: str, load: float, host: float, runs: Runs) -> str:
    """One cell."""
    default, auto = STATIC[host][0], OURS[host][0]
    best = min(STATIC[host], key=lambda arm: ratio(runs, arm, "mean", default))
    others = [
        percent(ratio(runs, arm, "mean", default)) if len(runs[arm]) == len(runs[auto]) else ""
        for arm in OURS[host][1:]
    ]
    cells = [
        workload,
        f"{load:.0%}",
        f"{statistics.fmean(one['mean'] for one in runs[default]):.3g}",
        best,
        percent(ratio(runs, best, "mean", default)),
        *(percent(ratio(runs, auto, of, default)) for of in ("mean", "p99", "max")),
        percent(ratio(runs, auto, "mean", best)),
        *others,
        str(len(runs[auto])),
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in tables())
