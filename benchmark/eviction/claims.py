"""Gains of `wa` and `etlru` over LRU and the simple baselines, with placebos."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from shared_traces import agents, mooncake

from canopy_lab.sim.driver import distinct_blocks, randomise_categories, simulate
from canopy_lab.sim.hindsight import make_hindsight
from canopy_lab.sim.hindsight.future import Future
from canopy_lab.trace.record import TraceRequest
from question import Question, RunContext
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.registry import make_policy

SEEDS = (1, 2, 3)
CAPACITY_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
SIMPLE_POLICIES = ("lru", "fifo", "lfu")
TAIL_BLOCKS = {"conversation": 42, "agentic": 182}
"""The threshold of the tail runs, in blocks of 512 tokens."""

PLOTTED_TRACES = ("conversation", "synthetic", "agentic")
STYLES: dict[str, dict[str, Any]] = {
    "hindsight": {"color": "grey", "ls": "--", "marker": "."},
    "wa": {"color": "C3", "marker": "o"},
    "wa, random labels": {"color": "C3", "ls": ":", "marker": "x"},
    "lru": {"color": "C0", "marker": "o"},
}


def with_random_labels(seed: int) -> Policy:
    """The placebo."""
    policy = make_policy("wa")
    randomise_categories(policy, seed)
    return policy


def with_one_curve() -> Policy:
    """WA without categories: every leaf ranks by the global curve."""
    policy: Any = make_policy("wa")
    policy.model.categories.refine = lambda names, *_: policy.model.categories.root
    return policy


PAPER_OPTIONS: dict[str, dict[str, Any]] = {
    "wa, exponential, type-turn": {"model": "exponential", "categories": "type-turn"},
    "wa, type-turn": {"categories": "type-turn"},
}
"""The ATC 2025 paper's policy, and its categories with our curves."""

VARIANTS: dict[str, Callable[[int], Policy]] = {
    "wa": lambda seed: make_policy("wa"),
    "wa, random labels": with_random_labels,
    "wa, one curve": lambda seed: with_one_curve(),
    **{
        name: (lambda seed, options=options: make_policy("wa", options))
        for name, options in PAPER_OPTIONS.items()
    },
    **{name: (lambda seed, name=name: make_policy(name)) for name in SIMPLE_POLICIES},
}


def read_traces(data: Path) -> Iterator[tuple[str, int, list[TraceRequest]]]:
    yield "conversation", 0, mooncake(data, "conversation")
    yield "synthetic", 0, mooncake(data, "synthetic")
    for seed in SEEDS:
        yield "agentic", seed, agents(data, 200, seed=seed)


def planned_runs(name: str) -> Iterator[tuple[str, float]]:
    """Yield the policies and capacities of a trace's runs."""
    for capacity in CAPACITY_SHARES:
        yield "lru", capacity
        yield "wa", capacity
        if capacity in (0.05, 0.1) or name in ("conversation", "synthetic"):
            yield from ((v, capacity) for v in VARIANTS if v not in ("lru", "wa"))
            yield "hindsight", capacity


def measure_hits(name: str, seed: int, trace: list[TraceRequest]) -> Iterator[dict[str, Any]]:
    distinct = distinct_blocks(trace)
    for policy, capacity in planned_runs(name):
        if policy == "hindsight":
            policy_under_test = make_hindsight("belady", Future(trace))
        else:
            policy_under_test = VARIANTS[policy](seed)
        result = simulate(trace, policy_under_test, max(1, int(distinct * capacity)))
        yield make_row(name, seed, policy, capacity, result, None)


def measure_tails(name: str, seed: int, trace: list[TraceRequest]) -> Iterator[dict[str, Any]]:
    capacity = {"conversation": 0.1, "agentic": 0.07}[name]
    threshold = float(TAIL_BLOCKS[name] * 512)
    blocks = int(distinct_blocks(trace) * capacity)
    for policy in ("lru", "wa", "canopy-tlru", "etlru"):
        tail = {"threshold_tokens": threshold} if policy.endswith("tlru") else None
        result = simulate(trace, make_policy(policy, tail), blocks, threshold_tokens=threshold)
        yield make_row(name, seed, policy, capacity, result, threshold)


def make_row(
    name: str, seed: int, policy: str, capacity: float, result: Any, threshold: float | None
) -> dict[str, Any]:
    return {
        "trace": name,
        "seed": seed,
        "policy": policy,
        "capacity_fraction": capacity,
        "capacity_blocks": result.capacity_blocks,
        "requests": result.requests,
        "block_hit_ratio": result.block_hit_ratio,
        "token_hit_ratio": result.token_hit_ratio,
        "uncached_tokens_p50": result.uncached_tokens_p50,
        "uncached_tokens_p90": result.uncached_tokens_p90,
        "uncached_tokens_p95": result.uncached_tokens_p95,
        "threshold_tokens": threshold,
        "tel_tokens": result.tel_tokens,
        "seconds": round(result.seconds, 3),
    }


def mean_of(rows: list[dict[str, Any]], key: str, **where: Any) -> float | None:
    values = [r[key] for r in rows if all(r[k] == v for k, v in where.items())]
    return statistics.fmean(values) if values else None


def draw_figure(rows: list[dict[str, Any]], path: Path) -> None:
    """Hit ratio against capacity, mean of the seeds."""
    hits = [r for r in rows if r["threshold_tokens"] is None]
    names = [n for n in dict.fromkeys(r["trace"] for r in hits) if n in PLOTTED_TRACES]
    figure, axes = plt.subplots(
        1, len(names), figsize=(4.2 * len(names), 3.7), layout="constrained", squeeze=False
    )
    for axis, name in zip(axes[0], names):
        for policy, style in STYLES.items():
            points = [
                (100 * c, 100 * ratio)
                for c in CAPACITY_SHARES
                if (
                    ratio := mean_of(
                        hits, "block_hit_ratio", trace=name, policy=policy, capacity_fraction=c
                    )
                )
                is not None
            ]
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


def run_claims(context: RunContext) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, seed, trace in read_traces(context.data):
        rows += measure_hits(name, seed, trace)
        if name in TAIL_BLOCKS:
            rows += measure_tails(name, seed, trace)
    draw_figure(rows, context.figure())
    return rows


QUESTIONS = (
    Question("claims", "hits by policy and capacity, and tails; placebos beside", run_claims, 15),
)
