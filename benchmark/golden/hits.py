"""(a) What every policy hits on the real traces, at four sizes of the cache."""

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
"""Row -> a policy's name in the simulator and its options."""

Task = tuple[str, float]


def tasks() -> list[Task]:
    """Return the independent tasks: a trace at a size."""
    return [(trace, cache_share) for trace in TRACES for cache_share in CACHE_SHARES]


def rows(task: Task) -> dict[str, Any]:
    """One row a policy. The tail is that beyond LRU's own 90th percentile."""
    name, cache_share = task
    trace = first_requests(name)
    blocks = max(1, round(cache_share * distinct_blocks(trace)))
    threshold = simulate(trace, make_policy("lru"), blocks).uncached_tokens_p90
    future = Future(trace)
    by_policy = {}

    def simulated_figures(policy: Any) -> dict[str, Any]:
        return stored_figures(simulate(trace, policy, blocks, threshold_tokens=threshold))

    for row, (policy, config) in POLICIES.items():
        target = {"threshold_tokens": threshold} if policy_class(policy).takes_tail_target else {}
        by_policy[row] = simulated_figures(make_policy(policy, config | target))
    for policy in hindsight_names():
        target = (
            {"threshold_tokens": threshold} if hindsight_class(policy).takes_tail_target else {}
        )
        by_policy[policy] = simulated_figures(make_hindsight(policy, future, target))
    return {f"{name} at {cache_share:.0%}, {row}": figures for row, figures in by_policy.items()}


def stored_figures(result: SimResult) -> dict[str, Any]:
    """Return the stored figures of a run."""
    return {
        "requests": result.requests,
        "blocks": result.blocks,
        "block_hits": result.block_hits,
        "token_hits": result.token_hits,
        "tail_tokens": result.tel_tokens,
        "evicted_blocks": result.evicted_blocks,
        "each_request": digest(result.uncached_tokens.tolist()),
    }
