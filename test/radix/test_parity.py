"""The simulator's tree and SGLang's real cache behave equally under the same policy.

Both are fed the same requests; every request must hit the same tokens, and every victim must be
the same part of the same path.
"""

from typing import Any

import pytest

from sglang_canopy.config.tiers import TreeSettings
from sglang_canopy.policy.block_tree import RadixTree, TreeCut
from sglang_canopy.policy.floored import FlooredPolicy
from sglang_canopy.policy.registry import live_names, make_policy
from sglang_canopy.records import Request
from support.live_tree import LiveTree, check
from support.parity import PAGE, add_samples, chained_path, fields, tokens_of, workload
from support.policy_rules import Readmission
from support.tree_recount import recount

MAX_BLOCKS = 40
"""Blocks of one page."""
CONFIGS: dict[str, list[dict[str, Any]]] = {
    "wa": [{}, {"model": "exponential"}, {"model": "exponential", "categories": "type-turn"}],
    "canopy-tlru": [{"threshold_tokens": 20}],
    "etlru": [{"threshold_tokens": 20}],
    "threshold-lru": [{"threshold_tokens": 24}],
}
CASES = [(name, config) for name in live_names() for config in CONFIGS.get(name, [{}])]


def simulate(
    policy: str,
    config: dict,
    steps: list[dict],
    page: int,
    lru_turns: range | None = None,
    **settings: Any,
):
    """``lru_turns``: the steps at which LRU and the policy take turns."""
    cuts: list[tuple[int, int, int]] = []

    def record(cut: TreeCut) -> None:
        cuts.append((cut.offset, cut.tokens, cut.blocks[0]))

    order = make_policy(policy, config)
    if lru_turns is not None:
        order = FlooredPolicy(order)
    tree = RadixTree(order, MAX_BLOCKS, page, on_evict=record, **settings)
    hits = []
    for number, step in enumerate(steps):
        if isinstance(order, FlooredPolicy) and lru_turns is not None and number in lru_turns:
            order.rank_by(lru=not order.is_lru_ranking)
        path = chained_path(step)
        request = Request(
            time=step["time"],
            path=path,
            block_tokens=page,
            prompt_tokens=len(path) * page,
            **fields(step),
        )
        hits.append(tree.access(request) * page)
        recount(tree)
    return hits, cuts


def serve_live(
    policy: str,
    config: dict,
    steps: list[dict],
    page: int,
    readmit: tuple[int, int] | None = None,
    lru_turns: range | None = None,
    **settings: Any,
):
    """``readmit``: seeds that draw which leaves are re-admitted before each request, and in which
    order."""
    options = {**config, **settings, "block_tokens": page}
    tree = LiveTree(MAX_BLOCKS * page, policy, options, page_size=page, floor=lru_turns is not None)
    core = tree.core
    cuts: list[tuple[int, int, int]] = []
    delete = core._delete_unbacked_device_leaf

    def record_and_delete(node: Any, *args: Any, **kwargs: Any) -> None:
        path, ancestor = [], node
        while ancestor is not core.root_node:
            path = list(ancestor.key.raw_token_ids()) + path
            ancestor = ancestor.parent
        blocks = path[::page]
        first = node.canopy.offset // page
        cuts.append((node.canopy.offset, len(node.key), hash((*blocks[: first + 1],))))
        delete(node, *args, **kwargs)

    core._delete_unbacked_device_leaf = record_and_delete
    readmission = None if readmit is None else Readmission(core, *readmit)
    hits = []
    for number, step in enumerate(steps):
        order = core.live.device_policy
        if isinstance(order, FlooredPolicy) and lru_turns is not None and number in lru_turns:
            order.rank_by(lru=not order.is_lru_ranking)
        if readmission is not None:
            readmission()
        labels = {"path": chained_path(step), "block_tokens": page}
        hits.append(tree.serve(tokens_of(step, page), step["time"], **labels, **fields(step)))
        check(tree)
    return hits, cuts


def check_equal(policy: str, config: dict[str, Any], page: int, **settings: Any) -> None:
    for seed in (1, 2):
        steps = workload(seed, 120)
        simulated_hits, simulated_cuts = simulate(policy, config, steps, page, **settings)
        live_hits, live_cuts = serve_live(policy, config, steps, page, **settings)
        first = next((i for i, (a, b) in enumerate(zip(simulated_hits, live_hits)) if a != b), None)
        assert first is None, (first, simulated_hits[first], live_hits[first])
        assert live_cuts == simulated_cuts
        assert sum(simulated_hits) > 0
        assert simulated_cuts


@pytest.mark.parametrize("whole", [False, True], ids=["by need", "whole nodes"])
@pytest.mark.parametrize(("policy", "config"), CASES, ids=[f"{n} {c or ''}" for n, c in CASES])
def test_simulator_and_live_cache_hit_and_evict_the_same(policy, config, whole):
    check_equal(policy, config, PAGE, quantum_tokens=1, whole_nodes=whole)


@pytest.mark.parametrize("policy", ["wa", "threshold-lru"])
def test_they_are_equal_while_lru_and_the_policy_take_turns(policy: str) -> None:
    config = CONFIGS.get(policy, [{}])[0]
    check_equal(policy, config, PAGE, quantum_tokens=1, lru_turns=range(20, 120, 15))


@pytest.mark.parametrize("policy", ["wa", "threshold-lru"])
def test_a_floored_policy_ranks_as_itself_or_as_lru(policy: str) -> None:
    config, steps = CONFIGS.get(policy, [{}])[0], workload(1, 120)
    policy_run, lru_run = (
        (simulate(name, options, steps, PAGE)) for name, options in ((policy, config), ("lru", {}))
    )
    assert policy_run != lru_run
    assert simulate(policy, config, steps, PAGE, range(0)) == policy_run
    assert simulate(policy, config, steps, PAGE, range(1)) == lru_run


@pytest.mark.parametrize("page", [4, 16, 64])
@pytest.mark.parametrize(("policy", "config"), CASES, ids=[f"{n} {c or ''}" for n, c in CASES])
def test_they_are_equal_at_the_servers_quantum(policy, config, page):
    check_equal(policy, config, page, quantum_tokens=TreeSettings().quantum_tokens)


@pytest.mark.parametrize(("policy", "config"), CASES, ids=[f"{n} {c or ''}" for n, c in CASES])
def test_the_order_in_which_leaves_are_admitted_decides_nothing(policy, config):
    steps = add_samples(workload(1, 80))
    first, second = (
        serve_live(policy, config, steps, PAGE, (1, order), quantum_tokens=1) for order in (1, 2)
    )
    assert first == second
    assert first[1]


@pytest.mark.parametrize("policy", ["canopy-lru", "threshold-lru", "wa"])
def test_a_readmitted_leaf_ranks_as_before(policy: str) -> None:
    steps = add_samples(workload(1, 80))
    expected = simulate(policy, {}, steps, PAGE, quantum_tokens=1)
    assert serve_live(policy, {}, steps, PAGE, (1, 1), quantum_tokens=1) == expected
