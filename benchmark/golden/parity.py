"""(b) Every hit and every victim of the parity suites' streams, in the simulator and served."""

from __future__ import annotations

from typing import Any

import test_parity
import test_tiered_parity
from paths import digest

from canopy_lab.sim.system.tree import TieredTree

QUANTUM_TOKENS = 64
"""Tokens that a server evicts at least."""
SEEDS, REQUESTS = (1, 2, 3, 4), 120
"""The suites go through the first two."""
PAPER_OPTIONS = {"model": "exponential", "categories": "type-turn"}

SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "lru": ("canopy-lru", {}),
    "wa": ("wa", {}),
    "wa, exponential": ("wa", {"model": "exponential"}),
    "wa, the paper's formula": ("wa", PAPER_OPTIONS),
    "tlru": ("canopy-tlru", {"threshold_tokens": 20}),
    "threshold-lru": ("threshold-lru", {"threshold_tokens": 24}),
    "etlru": ("etlru", {"threshold_tokens": 20}),
}
"""Row -> a policy that servers have, and its options."""
SIMULATED: dict[str, tuple[str, dict[str, Any]]] = {
    "sglang's tlru": ("sglang-tlru", {"threshold_tokens": 20, "next_prompt_tokens": 4}),
    "lfu": ("lfu", {}),
    "fifo": ("fifo", {}),
}
"""Row -> a policy of the simulator alone."""
EVICTION_CUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pages of 4 by need": (4, {"quantum_tokens": 1, "whole_nodes": False}),
    "pages of 4, whole nodes": (4, {"quantum_tokens": 1, "whole_nodes": True}),
    **{f"pages of {page}": (page, {"quantum_tokens": QUANTUM_TOKENS}) for page in (4, 16, 64)},
}
TIERED_SIZES = ((4, 1), (4, 64), (16, 64), (64, 64))
"""Tokens of a page and of the quantum."""

Task = tuple[str, str]


def tasks() -> list[Task]:
    """Return the independent tasks: a policy on one or two tiers."""
    return [
        *(("one tier", row_name) for row_name in (*SERVED, *SIMULATED)),
        *(("two tiers", policy) for policy in ("canopy-lru", "wa")),
    ]


def rows(task: Task) -> dict[str, Any]:
    """Return hits, victims and their digest, for served policies on both trees."""
    tiers, row_name = task
    return compare_one_tier(row_name) if tiers == "one tier" else compare_two_tiers(row_name)


def compare_one_tier(row_name: str) -> dict[str, Any]:
    """Return a row for each way to cut."""
    policy, config = (SERVED | SIMULATED)[row_name]
    runs = {"simulated": test_parity.simulate}
    if row_name in SERVED:
        runs["served"] = test_parity.serve_live
    rows = {}
    for cut, (page, settings) in EVICTION_CUTS.items():
        for side, run in runs.items():
            hits: list[int] = []
            victims: list[tuple[int, int, int]] = []
            for seed in SEEDS:
                steps = test_parity.workload(seed, REQUESTS)
                seen = run(policy, config, steps, page, **settings)
                hits += seen[0]
                victims += seen[1]
            rows[f"{row_name}, {cut}, {side}"] = {
                "token_hits": sum(hits),
                "victims": len(victims),
                "evicted_tokens": sum(tokens for _, tokens, _ in victims),
                "each": digest([hits, victims]),
            }
    return rows


def compare_two_tiers(policy: str) -> dict[str, Any]:
    """Return each request's hits on device and host, and the contents of both after it."""
    rows = {}
    name = policy.removeprefix("canopy-")
    for page, quantum in TIERED_SIZES:
        states_by_side = {"simulated": [], "served": []}
        for seed in (1, 2, 3):
            steps = test_parity.workload(seed, 150)
            served, host_tokens = test_tiered_parity.serve_live(policy, page, quantum, steps)
            states_by_side["simulated"] += test_tiered_parity.simulate(
                policy, page, quantum, steps, host_tokens, TieredTree
            )
            states_by_side["served"] += served
        for side, states in states_by_side.items():
            rows[f"{name} on device and host, pages of {page}, quantum {quantum}, {side}"] = {
                "device_hits": sum(state[0] for state in states),
                "host_hits": sum(state[1] for state in states),
                "each": digest(states),
            }
    return rows
