"""Gain of hints about the future: hit ratio by the share of clients that give them, and by accuracy.

After each response a client hints either that its conversation is over, or the seconds until it
continues. The truth is the trace's own future; a false hint is the opposite (over or not), or another
client's time. True hints of agents are also run without the names of their sessions: a conversation
with a rewritten history then looks over.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from shared_traces import agents, mooncake

from canopy_lab.sim.driver import distinct_blocks, simulate
from canopy_lab.sim.hindsight import make_hindsight
from canopy_lab.sim.hindsight.future import Future
from canopy_lab.sim.requests import SimulatedHints
from canopy_lab.trace.record import TraceRequest
from question import Question, QuestionRun
from sglang_canopy.policy.registry import make_policy

HINTING_SHARES = (0.0, 0.25, 0.5, 1.0)
"""Shares of clients that give hints."""
HINT_ACCURACIES = (1.0, 0.75, 0.5, 0.0)
"""Shares of hints that are true."""
CAPACITY_SHARE = 0.05
PLOTTED_TRACES = ("conversation", "agentic")
"""Traces of the figure, with hints of every accuracy."""


def read_traces(data_folder: Path) -> Iterator[tuple[str, tuple[int, ...], list[TraceRequest]]]:
    """Yield each trace with its name and the seeds of its hints."""
    yield "conversation", (1, 2), mooncake(data_folder, "conversation")
    agentic = agents(data_folder, 200)
    yield "agentic", (1,), agentic
    yield "agentic, no names", (1,), [replace(request, conversation=None) for request in agentic]


def sweep_hints(
    trace_name: str, seeds: tuple[int, ...], trace: list[TraceRequest]
) -> Iterator[dict[str, Any]]:
    capacity_blocks = int(distinct_blocks(trace) * CAPACITY_SHARE)
    bounds = {"lru": make_policy("lru"), "hindsight": make_hindsight("belady", Future(trace))}
    for bound, policy in bounds.items():
        hit_ratio = simulate(trace, policy, capacity_blocks).block_hit_ratio
        yield {"trace": trace_name, "policy": bound, "block_hit_ratio": hit_ratio}
    for accuracy in HINT_ACCURACIES if trace_name in PLOTTED_TRACES else HINT_ACCURACIES[:1]:
        for share in HINTING_SHARES if accuracy == 1.0 else HINTING_SHARES[1:]:
            for seed in seeds if share else seeds[:1]:
                hints = SimulatedHints(share=share, accuracy=accuracy, seed=seed)
                result = simulate(trace, make_policy("wa"), capacity_blocks, hints=hints)
                yield {
                    "trace": trace_name,
                    "policy": "wa",
                    "share": share,
                    "accuracy": accuracy,
                    "seed": seed,
                    "block_hit_ratio": result.block_hit_ratio,
                }


def mean_hit_percent(rows: list[dict[str, Any]], **where: Any) -> float:
    """Return the mean hit ratio, in %, of the rows that have all values in ``where``."""
    matching = [r for r in rows if all(r.get(k) == v for k, v in where.items())]
    return 100 * statistics.fmean(r["block_hit_ratio"] for r in matching)


def _hit_percent(rows: list[dict[str, Any]], name: str, share: float, accuracy: float) -> float:
    return mean_hit_percent(rows, trace=name, share=share, accuracy=accuracy if share else 1.0)


def draw_figure(rows: list[dict[str, Any]], path: Path) -> None:
    names = PLOTTED_TRACES
    figure, axes = plt.subplots(
        1, len(names), figsize=(4.6 * len(names), 3.8), layout="constrained", squeeze=False
    )
    colours = plt.get_cmap("viridis")
    for axis, name in zip(axes[0], names):
        for i, accuracy in enumerate(HINT_ACCURACIES):
            hits = [_hit_percent(rows, name, s, accuracy) for s in HINTING_SHARES]
            shade = colours(0.9 * i / (len(HINT_ACCURACIES) - 1))
            label = f"{accuracy:.0%} of hints true"
            axis.plot([100 * s for s in HINTING_SHARES], hits, "o-", color=shade, label=label)
        for policy, style in (("hindsight", "--"), ("lru", ":")):
            axis.axhline(mean_hit_percent(rows, trace=name, policy=policy), color="grey", ls=style)
            axis.annotate(
                policy,
                (0, mean_hit_percent(rows, trace=name, policy=policy)),
                xytext=(0, -11 if policy == "hindsight" else 3),
                textcoords="offset points",
                color="grey",
            )
        axis.set_title(f"{name}, {CAPACITY_SHARE:.0%} of distinct blocks", fontsize=10)
        axis.set_xlabel("clients that give hints, %")
        axis.set_ylabel("block hit ratio, %")
        axis.grid(alpha=0.25)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def run_hints(run: QuestionRun) -> list[dict[str, Any]]:
    rows = [row for case in read_traces(run.data_folder) for row in sweep_hints(*case)]
    draw_figure(rows, run.figure_path())
    return rows


QUESTIONS = (Question("hints", "hits by share and accuracy of clients' hints", run_hints, 10),)
