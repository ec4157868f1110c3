"""Simulated hits of `wa` beside LRU, FIFO and LFU by cache size, and tails of `etlru`, with placebos.

python benchmark/run.py eviction/claims
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from shared_traces import agents, mooncake

from canopy_lab.sim.driver import SimResult, distinct_blocks, randomise_categories, simulate
from canopy_lab.sim.hindsight import make_hindsight
from canopy_lab.sim.hindsight.future import Future
from canopy_lab.trace.record import TraceRequest
from question import Question, QuestionRun
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.registry import make_policy

Row = dict[str, Any]
SEEDS = (1, 2, 3)
CAPACITY_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
SIMPLE_POLICIES = ("lru", "fifo", "lfu")
TAIL_BLOCKS = {"conversation": 42, "agentic": 182}
"""Trace -> threshold of the tail runs, in blocks of 512 tokens."""

PLOTTED_TRACES = ("conversation", "synthetic", "agentic")
STYLES: dict[str, dict[str, Any]] = {
    "hindsight": {"color": "grey", "ls": "--", "marker": "."},
    "wa": {"color": "C3", "marker": "o"},
    "wa, random labels": {"color": "C3", "ls": ":", "marker": "x"},
    "lru": {"color": "C0", "marker": "o"},
}


def with_random_labels(seed: int) -> Policy:
    """Return WA with each request's category replaced by another request's: the placebo."""
    policy = make_policy("wa")
    randomise_categories(policy, seed)
    return policy


def with_one_curve() -> Policy:
    """Return WA without categories: every leaf ranks by the global reuse curve."""
    policy: Any = make_policy("wa")
    policy.model.categories.refine = lambda names, *_: policy.model.categories.root
    return policy


PAPER_OPTIONS: dict[str, dict[str, Any]] = {
    "wa, exponential, type-turn": {"model": "exponential", "categories": "type-turn"},
    "wa, type-turn": {"categories": "type-turn"},
}
"""The ATC 2025 paper's policy, and its categories with our curves."""

POLICY_MAKERS: dict[str, Callable[[int], Policy]] = {
    "wa": lambda seed: make_policy("wa"),
    "wa, random labels": with_random_labels,
    "wa, one curve": lambda seed: with_one_curve(),
    **{
        name: (lambda seed, options=options: make_policy("wa", options))
        for name, options in PAPER_OPTIONS.items()
    },
    **{name: (lambda seed, name=name: make_policy(name)) for name in SIMPLE_POLICIES},
}
"""Label -> function from a seed to a new policy; only the placebo reads the seed."""


def read_traces(data_folder: Path) -> Iterator[tuple[str, int, list[TraceRequest]]]:
    """Yield each trace with its name and seed."""
    yield "conversation", 0, mooncake(data_folder, "conversation")
    yield "synthetic", 0, mooncake(data_folder, "synthetic")
    for seed in SEEDS:
        yield "agentic", seed, agents(data_folder, 200, seed=seed)


def planned_runs(trace_name: str) -> Iterator[tuple[str, float]]:
    """Yield the policies and capacities of a trace's runs."""
    for capacity_share in CAPACITY_SHARES:
        yield "lru", capacity_share
        yield "wa", capacity_share
        if capacity_share in (0.05, 0.1) or trace_name in ("conversation", "synthetic"):
            yield from ((v, capacity_share) for v in POLICY_MAKERS if v not in ("lru", "wa"))
            yield "hindsight", capacity_share


def measure_hits(trace_name: str, seed: int, trace: list[TraceRequest]) -> Iterator[Row]:
    trace_blocks = distinct_blocks(trace)
    for label, capacity_share in planned_runs(trace_name):
        if label == "hindsight":
            policy = make_hindsight("belady", Future(trace))
        else:
            policy = POLICY_MAKERS[label](seed)
        result = simulate(trace, policy, max(1, int(trace_blocks * capacity_share)))
        labels = {"trace": trace_name, "seed": seed, "policy": label}
        yield labels | {"capacity_fraction": capacity_share} | figures_of(result, None)


def measure_tails(trace_name: str, seed: int, trace: list[TraceRequest]) -> Iterator[Row]:
    capacity_share = {"conversation": 0.1, "agentic": 0.07}[trace_name]
    threshold_tokens = float(TAIL_BLOCKS[trace_name] * 512)
    capacity_blocks = int(distinct_blocks(trace) * capacity_share)
    tail_target = {"threshold_tokens": threshold_tokens}
    for name in ("lru", "wa", "canopy-tlru", "etlru"):
        policy = make_policy(name, tail_target if name.endswith("tlru") else None)
        result = simulate(trace, policy, capacity_blocks, **tail_target)
        labels = {"trace": trace_name, "seed": seed, "policy": name}
        figures = figures_of(result, threshold_tokens)
        yield labels | {"capacity_fraction": capacity_share} | figures


def figures_of(result: SimResult, threshold_tokens: float | None) -> Row:
    return {
        "capacity_blocks": result.capacity_blocks,
        "requests": result.requests,
        "block_hit_ratio": result.block_hit_ratio,
        "token_hit_ratio": result.token_hit_ratio,
        "uncached_tokens_p50": result.uncached_tokens_p50,
        "uncached_tokens_p90": result.uncached_tokens_p90,
        "uncached_tokens_p95": result.uncached_tokens_p95,
        "threshold_tokens": threshold_tokens,
        "tel_tokens": result.tel_tokens,
        "seconds": round(result.seconds, 3),
    }


def mean_of(rows: list[Row], key: str, **where: Any) -> float | None:
    """Return the mean of ``key`` over the rows that have all values in ``where``; None without rows."""
    values = [r[key] for r in rows if all(r[k] == v for k, v in where.items())]
    return statistics.fmean(values) if values else None


def draw_figure(rows: list[Row], path: Path) -> None:
    """Draw the hit ratio against the capacity, as the mean over seeds."""
    hits = [r for r in rows if r["threshold_tokens"] is None]
    names = [n for n in dict.fromkeys(r["trace"] for r in hits) if n in PLOTTED_TRACES]
    figure, axes = plt.subplots(
        1, len(names), figsize=(4.2 * len(names), 3.7), layout="constrained", squeeze=False
    )
    for axis, name in zip(axes[0], names):
        for policy, style in STYLES.items():
            points = []
            for share in CAPACITY_SHARES:
                case = {"trace": name, "policy": policy, "capacity_fraction": share}
                ratio = mean_of(hits, "block_hit_ratio", **case)
                points += [] if ratio is None else [(100 * share, 100 * ratio)]
            if points:
                axis.plot(*zip(*points), label=policy, **style)
        axis.set_xscale("log")
        ticks = [100 * c for c in CAPACITY_SHARES]
        axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axis.minorticks_off()
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("capacity, % of distinct blocks")
        axis.set_ylabel("block hit ratio, %")
        axis.grid(alpha=0.25)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def run_claims(run: QuestionRun) -> list[Row]:
    rows: list[Row] = []
    for trace_name, seed, trace in read_traces(run.data_folder):
        rows += measure_hits(trace_name, seed, trace)
        if trace_name in TAIL_BLOCKS:
            rows += measure_tails(trace_name, seed, trace)
    draw_figure(rows, run.figure_path())
    return rows


QUESTIONS = (
    Question("claims", "hits by policy and capacity, and tails; placebos beside", run_claims, 15),
)
