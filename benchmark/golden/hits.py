"""Golden rows of simulated hits: every policy on three real traces, at four cache sizes."""

from __future__ import annotations

from typing import Any

from paths import digest
from real_traces import TRACES, first_requests

from canopy_lab.sim.driver import SimResult, distinct_blocks, simulate
from canopy_lab.sim.hindsight import hindsight_class, hindsight_names, make_hindsight
from canopy_lab.sim.hindsight.future import Future
from sglang_canopy.policy.registry import make_policy, policy_class

CACHE_SHARES = (0.02, 0.05, 0.10, 0.20)
"""Cache sizes as shares of the trace's distinct blocks."""
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "lru": ("lru", {}),
    "wa": ("wa", {}),
    "wa, the paper's formula": ("wa", {"model": "exponential", "categories": "type-turn"}),
    "tlru": ("canopy-tlru", {}),
    "sglang's tlru": ("sglang-tlru", {}),
    "threshold-lru": ("threshold-lru", {}),
    "etlru": ("etlru", {}),
    "lfu": ("lfu", {}),
    "fifo": ("fifo", {}),
}
"""Label of a row -> a policy's name in the simulator, and its options."""

HitsTask = tuple[str, float]
"""A trace's name and the share of its distinct blocks that the cache holds."""


def tasks() -> list[HitsTask]:
    """Return the independent tasks, one for each trace and cache size."""
    return [(trace, cache_share) for trace in TRACES for cache_share in CACHE_SHARES]


def rows(task: HitsTask) -> dict[str, Any]:
    """Return a row for each policy. Tail tokens are those above LRU's 90th percentile of uncached tokens."""
    trace_name, cache_share = task
    trace = first_requests(trace_name)
    cache_blocks = max(1, round(cache_share * distinct_blocks(trace)))
    threshold_tokens = simulate(trace, make_policy("lru"), cache_blocks).uncached_tokens_p90
    tail_target = {"threshold_tokens": threshold_tokens}
    future = Future(trace)
    figures_by_label = {}

    def simulated_figures(policy: Any) -> dict[str, Any]:
        return stored_figures(simulate(trace, policy, cache_blocks, **tail_target))

    for label, (name, config) in POLICIES.items():
        target = tail_target if policy_class(name).takes_tail_target else {}
        figures_by_label[label] = simulated_figures(make_policy(name, config | target))
    for name in hindsight_names():
        target = tail_target if hindsight_class(name).takes_tail_target else {}
        figures_by_label[name] = simulated_figures(make_hindsight(name, future, target))
    prefix = f"{trace_name} at {cache_share:.0%}"
    return {f"{prefix}, {label}": figures for label, figures in figures_by_label.items()}


def stored_figures(result: SimResult) -> dict[str, Any]:
    """Return the figures of a simulation that ``rows.json`` has."""
    return {
        "requests": result.requests,
        "blocks": result.blocks,
        "block_hits": result.block_hits,
        "token_hits": result.token_hits,
        "tail_tokens": result.tel_tokens,
        "evicted_blocks": result.evicted_blocks,
        "each_request": digest(result.uncached_tokens.tolist()),
    }
