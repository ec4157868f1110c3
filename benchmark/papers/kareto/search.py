"""Figures 12 and 13: searches compared with a grid, and their extremes with fixed DRAM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from kareto.algorithm1 import adaptive_pareto_exploration
from kareto.setting import DISK, FIXED_GIB, INSTANCES, TRACES, configuration, inputs, run, short

from canopy_lab.plan.objective import OBJECTIVES, Scale
from canopy_lab.plan.planner import make_space
from canopy_lab.plan.request import PlanRequest
from canopy_lab.plan.search import search
from canopy_lab.plan.space import Configuration
from canopy_lab.plan.system import least_cost
from question import Question, RunContext

PAPER_START = ((0.0, 2048.0, 512.0), (0.0, 2400.0, 600.0))
"""The coarse grid that the paper's search begins with (section 5.3.1): DRAM and disk, GB."""
FINE = (256.0, 400.0)
"""Steps of the grid of Figure 13: finer than where either search begins. The paper's: 256, 120."""
MAX_GIB = (4096.0, 3600.0)
SEARCHES = ("Algorithm 1", "canopy plan")
DRAWS = 200
SLOS = 100


class Points:
    """Evaluates sizes for a trace and a number of instances; each once."""

    def __init__(self, name: str, instances: int, context: RunContext) -> None:
        self.inputs = inputs(name, context.data)
        self.instances = instances
        self.evaluated: dict[Configuration, dict[str, Any]] = {}

    def evaluate_sizes(self, dram_gib: float, disk_gib: float) -> dict[str, Any]:
        return self.evaluate(configuration(self.instances, dram_gib, disk_gib))

    def evaluate(self, c: Configuration) -> dict[str, Any]:
        if c not in self.evaluated:
            self.evaluated[c] = run(self.inputs, c)
        return self.evaluated[c]

    def grid(self, steps: tuple[float, float]) -> list[dict[str, Any]]:
        return [
            self.evaluate_sizes(float(d), float(s))
            for d in np.arange(0, MAX_GIB[0] + 1, steps[0])
            for s in np.arange(0, MAX_GIB[1] + 1, steps[1])
        ]

    def paper(self) -> list[dict[str, Any]]:
        """Algorithm 1 over the disk's size."""
        evaluated = adaptive_pareto_exploration(
            lambda p: self.evaluate_sizes(*p), *PAPER_START, MAX_GIB[0]
        )
        return list(evaluated.values())

    def planner_rows(self) -> list[dict[str, Any]]:
        """``plan/search.py`` as ``canopy plan`` would search up to these sizes."""
        prices = self.inputs.prices
        request = PlanRequest(
            disks=(DISK,),
            instances=(self.instances,),
            dram_gib=MAX_GIB[0] * self.instances,
            disk_gib=MAX_GIB[1],
            choices={"prefetch_policy": ("best_effort",)},
        )
        space = make_space(request, MAX_GIB[0], prices)
        result = search(
            space,
            OBJECTIVES,
            lambda batch: [self.evaluate(c) for c in batch],
            bounds_of=lambda c, rows: least_cost(c, rows, prices),
        )
        return list(result.rows.values())


def figure_13(context: RunContext) -> Any:
    """Evaluations, dominated volume and cost regret: a fine grid, the paper's search, ours, and as
    many random points of the grid as each search took."""
    cases: dict[str, Any] = {}
    for name in ("A", "C"):
        points = Points(name, 1, context)
        ways = {
            "Algorithm 1": points.paper(),
            "canopy plan": points.planner_rows(),
            "grid": points.grid(FINE),
        }
        judge = Judge.from_rows([row for rows in ways.values() for row in rows], ways["grid"])
        few = dict.fromkeys(len({id(row) for row in ways[way]}) for way in SEARCHES)
        cases[f"{name}, 1"] = {
            "grid_step_gib": FINE,
            "slos_s": [round(slo, 3) for slo in judge.slos],
            **{way: judge.measures(rows) for way, rows in ways.items()},
            "random points": {
                str(count): placebo(judge, ways["grid"], count) for count in (*few, 5)
            },
        }
    _draw_13(cases, context)
    return cases


@dataclass(frozen=True)
class Judge:
    """Measures of a set of points against all points known."""

    scale: Scale
    whole: float
    slos: tuple[float, ...]
    """Limits on mean TTFT, evenly in its logarithm from the least known to the most."""
    least: tuple[float, ...]
    """Least known cost that meets each SLO."""

    @classmethod
    def from_rows(cls, rows: list[dict[str, Any]], grid: list[dict[str, Any]]) -> Judge:
        scale = Scale.around(OBJECTIVES.matrix(rows))
        ttft = [row["mean_ttft_s"] for row in rows]
        slos = tuple(float(t) for t in np.geomspace(min(ttft) * 1.001, max(ttft), SLOS))
        least = tuple(x for x in _cheapest(rows, slos) if x is not None)
        return cls(scale, scale.hypervolume(OBJECTIVES.matrix(grid)), slos, least)

    def measures(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """``of_grid``: the share of the grid's dominated volume; ``regret``: how much more than the
        least cost it takes to meet an SLO, the mean of those that some point meets; ``unmet``: the
        share of the SLOs that none does."""
        volume = self.scale.hypervolume(OBJECTIVES.matrix(rows))
        pairs = [(c, b) for c, b in zip(_cheapest(rows, self.slos), self.least) if c is not None]
        return {
            "evaluations": len({id(r) for r in rows}),
            "hypervolume": round(volume, 5),
            "of_grid": round(volume / self.whole, 5),
            "front": len(OBJECTIVES.front(rows)),
            "regret": round(float(np.mean([c / b - 1 for c, b in pairs])), 5) if pairs else None,
            "unmet": round(1 - len(pairs) / len(self.slos), 4),
        }


def placebo(judge: Judge, grid: list[dict[str, Any]], count: int) -> dict[str, Any]:
    """``DRAWS`` sets of ``count`` points of the grid: the mean of each measure, and 90 % of them."""
    draw = np.random.default_rng(0)
    sets = [
        judge.measures([grid[i] for i in draw.choice(len(grid), count, replace=False)])
        for _ in range(DRAWS)
    ]
    summary: dict[str, Any] = {"draws": DRAWS}
    for key in ("of_grid", "regret", "unmet"):
        values = [one[key] for one in sets if one[key] is not None]
        low, high = np.quantile(values, [0.05, 0.95])
        summary[key] = [round(float(x), 5) for x in (np.mean(values), low, high)]
    return summary


def _cheapest(rows: list[dict[str, Any]], slos: tuple[float, ...]) -> list[float | None]:
    """Return the least cost that meets each SLO; None if no row meets it."""
    least = []
    for slo in slos:
        costs = [row["cost"] for row in rows if row["mean_ttft_s"] <= slo]
        least.append(min(costs) if costs else None)
    return least


def figure_12(context: RunContext) -> Any:
    """Compare the extremes of the paper's search with fixed DRAM: three traces, one and four instances."""
    cases: dict[str, Any] = {}
    for name in TRACES:
        for instances in INSTANCES:
            points = Points(name, instances, context)
            rows = points.paper()
            cases[f"{name}, {instances}"] = {
                "evaluations": len(rows),
                "extremes": _extremes(points, rows),
            }
    _draw_12(cases, context)
    return cases


def _extremes(points: Points, rows_of_search: list[dict[str, Any]]) -> dict[str, Any]:
    """Return Figure 12: the extremes of the paper's search, and 1,024 GB of DRAM per instance."""
    fixed = points.evaluate_sizes(FIXED_GIB, 0.0)
    rows = [*rows_of_search, fixed]
    chosen = {
        "most throughput": max(rows, key=lambda r: (r["throughput_tokens_per_s"], -r["cost"])),
        "least mean TTFT": min(rows, key=lambda r: (r["mean_ttft_s"], r["cost"])),
        "least cost": min(rows, key=lambda r: r["cost"]),
    }
    as_good = [
        r
        for r in rows
        if r["mean_ttft_s"] <= fixed["mean_ttft_s"] * 1.01
        and r["throughput_tokens_per_s"] >= fixed["throughput_tokens_per_s"] * 0.999
    ]
    chosen["cheapest as good as fixed"] = min(as_good, key=lambda r: r["cost"])
    return {
        "fixed": short(fixed),
        **{
            name: {**short(row), "against_fixed": _against(row, fixed)}
            for name, row in chosen.items()
        },
    }


def _against(row: dict[str, Any], fixed: dict[str, Any]) -> dict[str, float]:
    return {
        key: round(row[key] / fixed[key] - 1, 4)
        for key in ("throughput_tokens_per_s", "mean_ttft_s", "cost")
    }


def _draw_13(cases: dict[str, Any], context: RunContext) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for panel, (name, case) in zip(panels, cases.items()):
        for i, way in enumerate(("grid", *SEARCHES)):
            panel.plot(case[way]["evaluations"], 100 * case[way]["regret"], "o", color=f"C{i}", label=way)  # fmt: skip
        drawn = sorted((int(n), row["regret"]) for n, row in case["random points"].items())
        counts, rows = zip(*drawn)
        panel.errorbar(
            counts,
            [100 * mean for mean, _, _ in rows],
            yerr=[[100 * max(m - a, 0) for m, a, _ in rows], [100 * max(b - m, 0) for m, _, b in rows]],
            fmt="x",
            color="0.5",
            capsize=3,
            label="random points (90 % of draws)",
        )  # fmt: skip
        panel.set_title(f"{name} instance", fontsize=10)
        panel.set_xlabel("evaluations")
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("cost over the least that meets the SLO, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)  # fmt: skip
    figure.savefig(context.figure(), dpi=95)
    plt.close(figure)


def _draw_12(cases: dict[str, Any], context: RunContext) -> None:
    figure, panels = plt.subplots(1, 3, figsize=(11.5, 3.6), layout="constrained")
    names = ("most throughput", "least mean TTFT", "least cost")
    keys = ("throughput_tokens_per_s", "mean_ttft_s", "cost")
    labels = ("throughput", "mean TTFT", "cost")
    x = np.arange(len(cases))
    for panel, name in zip(panels, names):
        for i, (key, label) in enumerate(zip(keys, labels)):
            change = [100 * f["extremes"][name]["against_fixed"][key] for f in cases.values()]
            panel.bar(x + 0.27 * (i - 1), np.clip(change, -100, 150), 0.26, label=label)
        panel.axhline(0, color="k", lw=0.8)
        panel.set_title(name, fontsize=10)
        panel.set_xticks(x, list(cases), fontsize=8)
        panel.set_xlabel("trace, instances")
        panel.grid(alpha=0.25, axis="y")
    panels[0].set_ylabel("% against 1,024 GiB of DRAM\n(cut off at +150)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)  # fmt: skip
    figure.savefig(context.figure(), dpi=90)
    plt.close(figure)


QUESTIONS = (
    Question("figure-12", "extremes of the front beside fixed DRAM", figure_12, 2.5),
    Question("figure-13", "searches against a grid", figure_13, 3.5),
)
