"""Figures 12 and 13: searches compared with a grid, and their extremes with fixed DRAM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from kareto import setting
from kareto.algorithm1 import GridAxis, adaptive_pareto_exploration

from canopy_lab.plan.objective import OBJECTIVES, Scale
from canopy_lab.plan.planner import make_space
from canopy_lab.plan.request import PlanRequest
from canopy_lab.plan.search import search
from canopy_lab.plan.space import Configuration
from canopy_lab.plan.system import cost_bounds
from question import Question, QuestionRun

PAPER_GRID_GIB = (GridAxis(0.0, 2048.0, 512.0), GridAxis(0.0, 2400.0, 600.0))
"""The coarse grid that the paper's search begins with (section 5.3.1): DRAM and disk, GB."""
FINE_STEPS_GIB = (256.0, 400.0)
"""Steps of the grid of Figure 13: finer than where either search begins. The paper's: 256, 120."""
MAX_GIB = (4096.0, 3600.0)
SEARCHES = ("Algorithm 1", "canopy plan")
PLACEBO_DRAWS = 200
SLO_COUNT = 100


class SizeEvaluator:
    """Evaluates sizes for a trace and a number of instances; each once."""

    def __init__(self, name: str, instances: int, run: QuestionRun) -> None:
        self.inputs = setting.make_inputs(name, run.data_folder)
        self.instances = instances
        self.evaluations: dict[Configuration, dict[str, Any]] = {}

    def evaluate_sizes(self, dram_gib: float, disk_gib: float) -> dict[str, Any]:
        return self.evaluate(setting.make_configuration(self.instances, dram_gib, disk_gib))

    def evaluate(self, configuration: Configuration) -> dict[str, Any]:
        if configuration not in self.evaluations:
            self.evaluations[configuration] = setting.simulate(self.inputs, configuration)
        return self.evaluations[configuration]

    def evaluate_grid(self, steps: tuple[float, float]) -> list[dict[str, Any]]:
        return [
            self.evaluate_sizes(float(d), float(s))
            for d in np.arange(0, MAX_GIB[0] + 1, steps[0])
            for s in np.arange(0, MAX_GIB[1] + 1, steps[1])
        ]

    def run_paper_search(self) -> list[dict[str, Any]]:
        """Algorithm 1 over the disk's size."""
        rows = adaptive_pareto_exploration(
            lambda p: self.evaluate_sizes(*p), *PAPER_GRID_GIB, MAX_GIB[0]
        )
        return list(rows.values())

    def run_planner(self) -> list[dict[str, Any]]:
        """``plan/search.py`` as ``canopy plan`` would search up to these sizes."""
        prices = self.inputs.prices
        request = PlanRequest(
            disks=(setting.DISK_CLASS,),
            instances=(self.instances,),
            dram_gib=MAX_GIB[0] * self.instances,
            disk_gib=MAX_GIB[1],
            choices={"prefetch_policy": ("best_effort",)},
        )
        space = make_space(request, MAX_GIB[0], prices)
        result = search(
            space,
            OBJECTIVES,
            lambda batch: [self.evaluate(configuration) for configuration in batch],
            bounds_of=lambda configuration, rows: cost_bounds(configuration, rows, prices),
        )
        return list(result.rows.values())


def figure_13(run: QuestionRun) -> Any:
    """Evaluations, dominated volume and cost regret: a fine grid, the paper's search, ours, and as
    many random points of the grid as each search took."""
    cases: dict[str, Any] = {}
    for name in ("A", "C"):
        evaluator = SizeEvaluator(name, 1, run)
        rows_by_search = {
            "Algorithm 1": evaluator.run_paper_search(),
            "canopy plan": evaluator.run_planner(),
            "grid": evaluator.evaluate_grid(FINE_STEPS_GIB),
        }
        grid = rows_by_search["grid"]
        judge = Judge.from_rows([row for rows in rows_by_search.values() for row in rows], grid)
        sizes = dict.fromkeys(len({id(row) for row in rows_by_search[s]}) for s in SEARCHES)
        cases[f"{name}, 1"] = {
            "grid_step_gib": FINE_STEPS_GIB,
            "slos_s": [round(slo, 3) for slo in judge.slos_s],
            **{search: judge.measure(rows) for search, rows in rows_by_search.items()},
            "random points": {
                str(count): measure_placebo(judge, grid, count) for count in (*sizes, 5)
            },
        }
    _draw_13(cases, run)
    return cases


@dataclass(frozen=True)
class Judge:
    """Measures of a set of points against all points known."""

    scale: Scale
    grid_volume: float
    slos_s: tuple[float, ...]
    """Limits on mean TTFT, evenly in its logarithm from the least known to the most."""
    least_costs: tuple[float, ...]
    """Least known cost that meets each SLO."""

    @classmethod
    def from_rows(cls, rows: list[dict[str, Any]], grid: list[dict[str, Any]]) -> Judge:
        scale = Scale.around(OBJECTIVES.matrix(rows))
        ttft = [row["mean_ttft_s"] for row in rows]
        slos_s = tuple(float(t) for t in np.geomspace(min(ttft) * 1.001, max(ttft), SLO_COUNT))
        least_costs = tuple(x for x in _least_costs(rows, slos_s) if x is not None)
        return cls(scale, scale.hypervolume(OBJECTIVES.matrix(grid)), slos_s, least_costs)

    def measure(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """``of_grid``: the share of the grid's dominated volume; ``regret``: how much more than the
        least cost it takes to meet an SLO, the mean of those that some point meets; ``unmet``: the
        share of the SLOs that none does."""
        volume = self.scale.hypervolume(OBJECTIVES.matrix(rows))
        costs = zip(_least_costs(rows, self.slos_s), self.least_costs)
        pairs = [(cost, least) for cost, least in costs if cost is not None]
        return {
            "evaluations": len({id(r) for r in rows}),
            "hypervolume": round(volume, 5),
            "of_grid": round(volume / self.grid_volume, 5),
            "front": len(OBJECTIVES.front(rows)),
            "regret": round(float(np.mean([c / b - 1 for c, b in pairs])), 5) if pairs else None,
            "unmet": round(1 - len(pairs) / len(self.slos_s), 4),
        }


def measure_placebo(judge: Judge, grid: list[dict[str, Any]], count: int) -> dict[str, Any]:
    """``PLACEBO_DRAWS`` sets of ``count`` points of the grid: the mean of each measure, and 90 % of them."""
    rng = np.random.default_rng(0)
    sets = [
        judge.measure([grid[i] for i in rng.choice(len(grid), count, replace=False)])
        for _ in range(PLACEBO_DRAWS)
    ]
    summary: dict[str, Any] = {"draws": PLACEBO_DRAWS}
    for key in ("of_grid", "regret", "unmet"):
        values = [measurement[key] for measurement in sets if measurement[key] is not None]
        low, high = np.quantile(values, [0.05, 0.95])
        summary[key] = [round(float(x), 5) for x in (np.mean(values), low, high)]
    return summary


def _least_costs(rows: list[dict[str, Any]], slos_s: tuple[float, ...]) -> list[float | None]:
    """Return the least cost that meets each SLO; None if no row meets it."""
    costs_by_slo = []
    for slo in slos_s:
        costs = [row["cost"] for row in rows if row["mean_ttft_s"] <= slo]
        costs_by_slo.append(min(costs) if costs else None)
    return costs_by_slo


def figure_12(run: QuestionRun) -> Any:
    """Compare the extremes of the paper's search with fixed DRAM: three traces, one and four instances."""
    cases: dict[str, Any] = {}
    for name in setting.TRACES:
        for instances in setting.INSTANCES:
            evaluator = SizeEvaluator(name, instances, run)
            rows = evaluator.run_paper_search()
            cases[f"{name}, {instances}"] = {
                "evaluations": len(rows),
                "extremes": _compare_extremes(evaluator, rows),
            }
    _draw_12(cases, run)
    return cases


def _compare_extremes(evaluator: SizeEvaluator, searched: list[dict[str, Any]]) -> dict[str, Any]:
    """Return Figure 12: the extremes of the paper's search, and 1,024 GB of DRAM per instance."""
    fixed_dram = evaluator.evaluate_sizes(setting.FIXED_GIB, 0.0)
    rows = [*searched, fixed_dram]
    chosen = {
        "most throughput": max(rows, key=lambda r: (r["throughput_tokens_per_s"], -r["cost"])),
        "least mean TTFT": min(rows, key=lambda r: (r["mean_ttft_s"], r["cost"])),
        "least cost": min(rows, key=lambda r: r["cost"]),
    }
    as_good_rows = [
        r
        for r in rows
        if r["mean_ttft_s"] <= fixed_dram["mean_ttft_s"] * 1.01
        and r["throughput_tokens_per_s"] >= fixed_dram["throughput_tokens_per_s"] * 0.999
    ]
    chosen["cheapest as good as fixed"] = min(as_good_rows, key=lambda r: r["cost"])
    return {
        "fixed": setting.quoted_fields(fixed_dram),
        **{
            name: {**setting.quoted_fields(row), "against_fixed": _relative_to(row, fixed_dram)}
            for name, row in chosen.items()
        },
    }


def _relative_to(row: dict[str, Any], fixed_dram: dict[str, Any]) -> dict[str, float]:
    return {
        key: round(row[key] / fixed_dram[key] - 1, 4)
        for key in ("throughput_tokens_per_s", "mean_ttft_s", "cost")
    }


def _draw_13(cases: dict[str, Any], run: QuestionRun) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for panel, (name, case) in zip(panels, cases.items()):
        for i, method in enumerate(("grid", *SEARCHES)):
            panel.plot(case[method]["evaluations"], 100 * case[method]["regret"], "o", color=f"C{i}", label=method)  # fmt: skip
        random_points = sorted((int(n), row["regret"]) for n, row in case["random points"].items())
        counts, rows = zip(*random_points)
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
    figure.savefig(run.figure_path(), dpi=95)
    plt.close(figure)


def _draw_12(cases: dict[str, Any], run: QuestionRun) -> None:
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
    figure.savefig(run.figure_path(), dpi=90)
    plt.close(figure)


QUESTIONS = (
    Question("figure-12", "extremes of the front beside fixed DRAM", figure_12, 2.5),
    Question("figure-13", "searches against a grid", figure_13, 3.5),
)
