"""``--radix-eviction auto`` against the best of SGLang's own settings, cell by cell.

    python benchmark/latency/simulated.py --data DATA run
    python benchmark/latency/auto.py > benchmark/latency/results/auto.md

Reads the runs of simulated.py. A cell is a workload, a load and a size of the host tier; its best
static setting is SGLang's setting in STATIC with the least mean TTFT, found by trying each, which no
operator can do: "shortest of 4" is the best of the four settings with all runs of the cell. Figures
are geometric means over profiles and seeds, in percent; for single parts and the placebo, over the
available runs.

Goodput: the load at which an arm's P99 exceeds that of the defaults at 80 % load, interpolated between
the loads of the runs, as a multiple of 80 %. Runs end at 110 %, that is at x1.38.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from simulated import LOADS, WORKLOADS, Part, crossing, fingerprint, name, parts

STATIC = {
    0.0: ("sglang", "hrrn", "shortest", "sessions", "few", "shortest-few", "shortest-sessions"),
    2.0: ("sglang-host", "back-host", "back-shortest-host", "back-sessions-host"),
}
"""SGLang's own settings, by the size of the host tier; the first are its defaults."""
OURS = {0.0: ("auto", "wa", "order", "random"), 2.0: ("auto-host", "wa-host")}
"""Our arms by size of the host tier; `random` is the placebo of an order."""
AT = 0.8
"""The load whose P99 under the defaults is the limit of goodput."""
Runs = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Arm -> the runs that it has, by profile and seed."""


def cell(workload: str, load: float, host: float) -> Runs:
    """The runs of every profile and seed that has the defaults and `auto`."""
    found: dict[str, dict[str, Mapping[str, float]]] = {}
    for part in parts():
        if (part.workload, part.host) == (workload, host) and part.path.exists():
            rows = rows_of(part, load)
            if {STATIC[host][0], OURS[host][0]} <= rows.keys():
                for arm, row in rows.items():
                    found.setdefault(arm, {})[part.key] = row
    return found


def rows_of(part: Part, load: float) -> dict[str, Any]:
    """The arms of one part that are up to date."""
    runs = json.loads(part.path.read_text())["runs"]
    rows = {arm.key: (runs.get(name(arm, load)), fingerprint(arm)) for arm in part.arms}
    return {key: row for key, (row, made) in rows.items() if row and row["arm"] == made}


def ratio(runs: Runs, arm: str, of: str, beside: str) -> float:
    """One arm's figure as a multiple of another's, over the runs that it has."""
    return statistics.geometric_mean(
        row[of] / runs[beside][part][of] for part, row in runs[arm].items()
    )


def percent(value: float) -> str:
    return f"{100 * (value - 1):+.0f}"


def tables() -> Iterator[str]:
    for host, (default, *_) in STATIC.items():
        ours = OURS[host]
        yield f"## {'No host tier' if not host else f'A host tier of {host:g} x the device'}\n"
        yield (
            f"| workload | load | {default}, mean s | best static | mean | `{ours[0]}`: mean "
            "| P99 | max | beside the best | worst run | "
            + " | ".join(f"`{arm}`" for arm in ours[1:])
            + " | runs |"
        )
        yield "|---|---:|---:|---|" + "---:|" * (7 + len(ours) - 1)
        for workload in WORKLOADS:
            for load in LOADS:
                runs = cell(workload, load, host)
                if runs:
                    yield row(workload, load, host, runs)
        yield ""
        arms = (*STATIC[host], *ours)
        yield f"| goodput, least to greatest run | {' | '.join(f'`{arm}`' for arm in arms)} |"
        yield "|---|" + "---:|" * len(arms)
        for workload in WORKLOADS:
            found = {arm: goodputs(workload, host, arm) for arm in arms}
            cells = [times(found[arm]) for arm in arms]
            yield f"| {workload} | {' | '.join(cells)} |"
        yield ""


def goodputs(workload: str, host: float, arm: str) -> list[float]:
    """Return the goodput of each profile and seed with all runs of ``arm`` and of the defaults."""
    default, found = STATIC[host][0], []
    for part in parts():
        if (part.workload, part.host) == (workload, host) and part.path.exists():
            by_load = {load: rows_of(part, load) for load in LOADS}
            if all({default, arm} <= rows.keys() for rows in by_load.values()):
                points = [(load, by_load[load][arm]["p99"]) for load in LOADS]
                found.append(crossing(points, by_load[AT][default]["p99"]) / AT)
    return found


def times(found: Sequence[float]) -> str:
    """Return the geometric mean and the range, as multiples."""
    if not found:
        return ""
    return f"x{statistics.geometric_mean(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def row(workload: str, load: float, host: float, runs: Runs) -> str:
    """One cell."""
    default, auto = STATIC[host][0], OURS[host][0]
    whole = len(runs[auto])
    tried = [arm for arm in STATIC[host] if len(runs.get(arm, ())) == whole]
    best = min(tried, key=lambda arm: ratio(runs, arm, "mean", default))
    worst = max(one["mean"] / runs[default][part]["mean"] for part, one in runs[auto].items())
    others = [
        percent(ratio(runs, arm, "mean", default)) if arm in runs else "" for arm in OURS[host][1:]
    ]
    cells = [
        workload,
        f"{load:.0%}",
        f"{statistics.fmean(one['mean'] for one in runs[default].values()):.3g}",
        f"{best} of {len(tried)}",
        percent(ratio(runs, best, "mean", default)),
        *(percent(ratio(runs, auto, of, default)) for of in ("mean", "p99", "max")),
        percent(ratio(runs, auto, "mean", best)),
        percent(worst),
        *others,
        str(whole),
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in tables())
