"""Golden rows of the parity suites' streams: every hit and victim, in the simulator and on SGLang's cache."""

from __future__ import annotations

from typing import Any

import test_parity
import test_tiered_parity
from paths import digest

from canopy_lab.sim.system.tree import TieredTree

QUANTUM_TOKENS = 64
"""Least tokens that a server evicts at once."""
SEEDS, REQUEST_COUNT = (1, 2, 3, 4), 120
"""Streams on one tier: their seeds and their length. The suites run the first two seeds."""
TIERED_SEEDS, TIERED_REQUEST_COUNT = (1, 2, 3), 150
PAPER_OPTIONS = {"model": "exponential", "categories": "type-turn"}

SERVED_POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "lru": ("canopy-lru", {}),
    "wa": ("wa", {}),
    "wa, exponential": ("wa", {"model": "exponential"}),
    "wa, the paper's formula": ("wa", PAPER_OPTIONS),
    "tlru": ("canopy-tlru", {"threshold_tokens": 20}),
    "threshold-lru": ("threshold-lru", {"threshold_tokens": 24}),
    "etlru": ("etlru", {"threshold_tokens": 20}),
}
"""Label of a row -> a policy that servers have, and its options."""
SIMULATED_POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "sglang's tlru": ("sglang-tlru", {"threshold_tokens": 20, "next_prompt_tokens": 4}),
    "lfu": ("lfu", {}),
    "fifo": ("fifo", {}),
}
"""Label of a row -> a policy of the simulator alone, and its options."""
EVICTION_CUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pages of 4 by need": (4, {"quantum_tokens": 1, "whole_nodes": False}),
    "pages of 4, whole nodes": (4, {"quantum_tokens": 1, "whole_nodes": True}),
    **{f"pages of {page}": (page, {"quantum_tokens": QUANTUM_TOKENS}) for page in (4, 16, 64)},
}
"""Name -> tokens of a page, and settings of ``test_parity.simulate`` and ``serve_live``."""
TIERED_PAGES_AND_QUANTA = ((4, 1), (4, 64), (16, 64), (64, 64))
"""Tokens of a page and of the eviction quantum."""

ParityTask = tuple[str, str]
"""``one tier`` and a label, or ``two tiers`` and a policy."""


def tasks() -> list[ParityTask]:
    """Return the independent tasks."""
    return [
        *(("one tier", label) for label in (*SERVED_POLICIES, *SIMULATED_POLICIES)),
        *(("two tiers", policy) for policy in ("canopy-lru", "wa")),
    ]


def rows(task: ParityTask) -> dict[str, Any]:
    """Return the rows of a task, for served policies on the simulator's tree and on SGLang's."""
    tiers, name = task
    return rows_of_one_tier(name) if tiers == "one tier" else rows_of_two_tiers(name)


def rows_of_one_tier(label: str) -> dict[str, Any]:
    """Return hits, victims and their digest, for each page size and way to cut evicted nodes."""
    policy, config = (SERVED_POLICIES | SIMULATED_POLICIES)[label]
    run_by_side = {"simulated": test_parity.simulate}
    if label in SERVED_POLICIES:
        run_by_side["served"] = test_parity.serve_live
    rows = {}
    for cut, (page_tokens, settings) in EVICTION_CUTS.items():
        for side, run in run_by_side.items():
            hits: list[int] = []
            victims: list[tuple[int, int, int]] = []
            for seed in SEEDS:
                steps = test_parity.workload(seed, REQUEST_COUNT)
                stream_hits, stream_victims = run(policy, config, steps, page_tokens, **settings)
                hits += stream_hits
                victims += stream_victims
            rows[f"{label}, {cut}, {side}"] = {
                "token_hits": sum(hits),
                "victims": len(victims),
                "evicted_tokens": sum(tokens for _, tokens, _ in victims),
                "each": digest([hits, victims]),
            }
    return rows


def rows_of_two_tiers(policy: str) -> dict[str, Any]:
    """Return each request's hits on device and host, and the contents of both after it."""
    rows = {}
    name = policy.removeprefix("canopy-")
    for page_tokens, quantum_tokens in TIERED_PAGES_AND_QUANTA:
        states_by_side = {"simulated": [], "served": []}
        for seed in TIERED_SEEDS:
            steps = test_parity.workload(seed, TIERED_REQUEST_COUNT)
            setup = (policy, page_tokens, quantum_tokens, steps)
            served, host_tokens = test_tiered_parity.serve_live(*setup)
            simulated = test_tiered_parity.simulate(*setup, host_tokens, TieredTree)
            states_by_side["simulated"] += simulated
            states_by_side["served"] += served
        for side, states in states_by_side.items():
            sizes = f"pages of {page_tokens}, quantum {quantum_tokens}"
            rows[f"{name} on device and host, {sizes}, {side}"] = {
                "device_hits": sum(state[0] for state in states),
                "host_hits": sum(state[1] for state in states),
                "each": digest(states),
            }
    return rows
