"""Simulations that the tables and figures share: policies by threshold and capacity, two traces."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from shared_traces import mooncake

from canopy_lab.sim.driver import SimResult, distinct_blocks, simulate
from canopy_lab.sim.hindsight import hindsight_names, make_hindsight
from canopy_lab.sim.hindsight.future import Future
from canopy_lab.sim.system import load_profile
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.registry import make_policy

PROFILE = "llama-3.1-8b-a100"
"""An 8B model on an A100, like the paper's Vicuna-7B; from published figures, not measured."""

CAPACITY_SHARES = (0.02, 0.05, 0.1, 0.2)
"""Cache sizes as shares of the trace's distinct blocks."""


@dataclass(frozen=True)
class TailArm:
    """A policy as the tables name it."""

    label: str
    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    takes_threshold: bool = True
    """Whether it receives the threshold."""
    fixed_growth: bool = False
    """Whether it plans with the trace's mean growth (the paper's estimate of Q)."""
    whole_nodes: bool = False


MIN_KEPT_TOKENS = 8192
"""Threshold-LRU does not keep shorter prompts."""
ONLINE_ARMS = (
    TailArm("lru", "lru", takes_threshold=False),
    TailArm("wa", "wa", takes_threshold=False),
    TailArm(
        f"threshold-lru {MIN_KEPT_TOKENS}",
        "threshold-lru",
        {"threshold_tokens": MIN_KEPT_TOKENS},
        False,
    ),
    TailArm("SGLang's tlru", "sglang-tlru", fixed_growth=True, whole_nodes=True),
    TailArm("sglang-tlru", "sglang-tlru", fixed_growth=True),
    TailArm("canopy-tlru, fixed Q", "canopy-tlru", fixed_growth=True),
    TailArm("canopy-tlru", "canopy-tlru"),
    TailArm("etlru", "etlru"),
)
HINDSIGHT_ARMS = (
    TailArm("end-aware", "end-aware-tlru"),
    TailArm("length-aware", "length-aware-tlru"),
    TailArm("tail-belady", "tail-belady"),
)


class Workbench:
    """A trace with values that are computed once."""

    def __init__(self, trace: Iterable[TraceRequest]) -> None:
        self.trace = list(trace)
        self.prompt_tokens = np.array([r.input_tokens for r in self.trace])
        self.trace_blocks = distinct_blocks(self.trace)
        self.future = Future(self.trace)
        self.growth_tokens = round(self.future.mean_growth_tokens)
        """Q-hat: mean tokens that the next prompt adds."""
        self.profile = load_profile(PROFILE)

    def ttft_ms(self, uncached_tokens: np.ndarray) -> np.ndarray:
        """Return the prefill times of single requests under the profile."""
        step = self.profile.prefill_batch_s
        return np.array(
            [
                1e3 * step([(max(int(u), 1), int(p) - max(int(u), 1))])
                for u, p in zip(uncached_tokens, self.prompt_tokens, strict=True)
            ]
        )

    def run(self, arm: TailArm, share: float, threshold: float, **settings: Any) -> SimResult:
        """Simulate an arm on a cache of ``share`` of the distinct blocks; ``threshold`` is in tokens."""
        options = dict(arm.options)
        if arm.takes_threshold:
            options["threshold_tokens"] = threshold
        if arm.fixed_growth:
            options["next_prompt_tokens"] = self.growth_tokens
        if arm.policy in hindsight_names():
            policy = make_hindsight(arm.policy, self.future, options)
        else:
            policy = make_policy(arm.policy, options)
        blocks = max(1, round(share * self.trace_blocks))
        settings = {"whole_nodes": arm.whole_nodes, "threshold_tokens": threshold, **settings}
        return simulate(self.trace, policy, blocks, **settings)

    def make_row(self, result: SimResult, slo_tokens: float) -> dict[str, float]:
        """Return the table's figures of a simulation; times in ms, TEL in thousands of tokens."""
        uncached = np.frombuffer(result.uncached_tokens, dtype=np.int64)
        times = self.ttft_ms(uncached)
        p50, p90, p95, p99 = (round(float(v), 1) for v in np.percentile(times, (50, 90, 95, 99)))
        return {
            "hit_pct": round(100 * result.block_hit_ratio, 2),
            "p90_tokens": result.uncached_tokens_p90,
            "p50_ms": p50,
            "p90_ms": p90,
            "p95_ms": p95,
            "p99_ms": p99,
            "tel_ktokens": round((result.tel_tokens or 0.0) / 1e3, 1),
            "over_threshold": int(result.slo_violations or 0),
            "over_slo": int((uncached > slo_tokens).sum()),
        }


def conversation(data: Path) -> Workbench:
    """Mooncake's conversation trace, in place of WildChat: real arrivals, longer prompts."""
    return Workbench(mooncake(data, "conversation"))


def sweep(
    workbench: Workbench,
    capacities: Sequence[float],
    thresholds: Sequence[float],
    slo_tokens: float,
    arms: Sequence[TailArm] = ONLINE_ARMS,
) -> list[dict[str, Any]]:
    """Run every arm at every threshold and capacity. An arm without a threshold runs once a capacity."""
    rows = []
    for capacity in capacities:
        for arm in arms:
            result = None
            for threshold in thresholds:
                if arm.takes_threshold or result is None:
                    result = workbench.run(arm, capacity, threshold)
                    row = workbench.make_row(result, slo_tokens)
                if not arm.takes_threshold:
                    uncached = np.frombuffer(result.uncached_tokens, dtype=np.int64)
                    excess = np.maximum(uncached - threshold, 0)
                    row = {
                        **row,
                        "tel_ktokens": round(float(excess.sum()) / 1e3, 1),
                        "over_threshold": int((excess > 0).sum()),
                    }
                labels = {"capacity": capacity, "threshold": threshold, "arm": arm.label}
                rows.append({**labels, **row})
    return rows


def gains_over(
    rows: Sequence[Mapping[str, Any]], arm: str, base: str, keys: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the improvement of ``arm`` over ``base`` in percent, cell by cell, as in the paper's tables."""
    cells = {(r["capacity"], r["threshold"], r["arm"]): r for r in rows}
    improvements = []
    for capacity, threshold, label in cells:
        if label != arm:
            continue
        ours, theirs = cells[capacity, threshold, arm], cells[capacity, threshold, base]
        gains_percent = {
            key: round(100 * (theirs[key] - ours[key]) / theirs[key], 1)
            if theirs[key]
            else math.nan
            for key in keys
        }
        improvements.append({"capacity": capacity, "threshold": threshold, **gains_percent})
    return improvements
