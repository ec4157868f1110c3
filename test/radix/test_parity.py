"""The simulator's tree and SGLang's real cache behave equally under the same policy.

Both are fed the same requests; every request must hit the same tokens, and every victim must be the
same part of the same path."""

from typing import Any, NamedTuple

import pytest

from sglang_canopy.config.tiers import TreeSettings
from sglang_canopy.policy.block_tree import RadixTree, TreeCut
from sglang_canopy.policy.floored import FlooredPolicy
from sglang_canopy.policy.registry import live_names, make_policy
from sglang_canopy.records import Request
from support.live_tree import LiveTree, check_tree
from support.parity import PAGE_TOKENS, add_samples, chained_path, fields_of, tokens_of, workload
from support.policy_rules import Readmission
from support.tree_recount import recount

MAX_BLOCKS = 40
"""Capacity of both trees; a block is one page."""
CONFIGS: dict[str, list[dict[str, Any]]] = {
    "wa": [{}, {"model": "exponential"}, {"model": "exponential", "categories": "type-turn"}],
    "canopy-tlru": [{"threshold_tokens": 20}],
    "etlru": [{"threshold_tokens": 20}],
    "threshold-lru": [{"threshold_tokens": 24}],
}
CASES = [(name, config) for name in live_names() for config in CONFIGS.get(name, [{}])]
CASE_NAMES = [f"{name} {config or ''}" for name, config in CASES]


class Served(NamedTuple):
    """Hits of each request; each victim's offset and length in tokens, and its first block."""

    hit_tokens: list[int]
    victims: list[tuple[int, int, int]]


def simulate(
    policy: str,
    config: dict,
    steps: list[dict],
    page_tokens: int,
    order_changes: range | None = None,
    **settings: Any,
) -> Served:
    """``order_changes``: the steps at which LRU and the policy change over."""
    victims: list[tuple[int, int, int]] = []

    def record(victim: TreeCut) -> None:
        victims.append((victim.offset, victim.tokens, victim.blocks[0]))

    ranking = make_policy(policy, config)
    if order_changes is not None:
        ranking = FlooredPolicy(ranking)
    tree = RadixTree(ranking, MAX_BLOCKS, page_tokens, on_evict=record, **settings)
    hit_tokens = []
    for number, step in enumerate(steps):
        if isinstance(ranking, FlooredPolicy) and number in (order_changes or ()):
            ranking.rank_by(lru=not ranking.is_lru_ranking)
        path = chained_path(step)
        request = Request(
            time=step["time"],
            path=path,
            block_tokens=page_tokens,
            prompt_tokens=len(path) * page_tokens,
            **fields_of(step),
        )
        hit_tokens.append(tree.access(request) * page_tokens)
        recount(tree)
    return Served(hit_tokens, victims)


def serve_live(
    policy: str,
    config: dict,
    steps: list[dict],
    page_tokens: int,
    readmission_seeds: tuple[int, int] | None = None,
    order_changes: range | None = None,
    **settings: Any,
) -> Served:
    """``readmission_seeds``: seeds of the leaves that are re-admitted before each request, and of their
    order."""
    options = {**config, **settings, "block_tokens": page_tokens}
    sizes = {"tokens": MAX_BLOCKS * page_tokens, "page_size": page_tokens}
    tree = LiveTree(policy=policy, config=options, has_floor=order_changes is not None, **sizes)
    core = tree.core
    victims: list[tuple[int, int, int]] = []
    original_delete = core._delete_unbacked_device_leaf

    def record_and_delete(node: Any, *args: Any, **kwargs: Any) -> None:
        path, ancestor = [], node
        while ancestor is not core.root_node:
            path = list(ancestor.key.raw_token_ids()) + path
            ancestor = ancestor.parent
        blocks = path[::page_tokens]
        victim_block = node.canopy.offset // page_tokens
        victims.append((node.canopy.offset, len(node.key), hash((*blocks[: victim_block + 1],))))
        original_delete(node, *args, **kwargs)

    core._delete_unbacked_device_leaf = record_and_delete
    readmission = None if readmission_seeds is None else Readmission(core, *readmission_seeds)
    hit_tokens = []
    for number, step in enumerate(steps):
        device_policy = core.live.device_policy
        if isinstance(device_policy, FlooredPolicy) and number in (order_changes or ()):
            device_policy.rank_by(lru=not device_policy.is_lru_ranking)
        if readmission is not None:
            readmission()
        labels = {"path": chained_path(step), "block_tokens": page_tokens}
        labels |= fields_of(step)
        hit_tokens.append(tree.serve(tokens_of(step, page_tokens), step["time"], **labels))
        check_tree(tree)
    return Served(hit_tokens, victims)


def check_equal(policy: str, config: dict[str, Any], page_tokens: int, **settings: Any) -> None:
    for seed in (1, 2):
        steps = workload(seed, 120)
        simulated_run = simulate(policy, config, steps, page_tokens, **settings)
        live_run = serve_live(policy, config, steps, page_tokens, **settings)
        assert live_run.hit_tokens == simulated_run.hit_tokens
        assert live_run.victims == simulated_run.victims
        assert sum(simulated_run.hit_tokens) > 0
        assert simulated_run.victims


@pytest.mark.parametrize("whole_nodes", [False, True], ids=["by need", "whole nodes"])
@pytest.mark.parametrize(("policy", "config"), CASES, ids=CASE_NAMES)
def test_simulator_and_live_cache_hit_and_evict_the_same(policy, config, whole_nodes):
    check_equal(policy, config, PAGE_TOKENS, quantum_tokens=1, whole_nodes=whole_nodes)


@pytest.mark.parametrize("policy", ["wa", "threshold-lru"])
def test_they_are_equal_while_lru_and_the_policy_alternate(policy: str) -> None:
    config = CONFIGS.get(policy, [{}])[0]
    check_equal(policy, config, PAGE_TOKENS, quantum_tokens=1, order_changes=range(20, 120, 15))


@pytest.mark.parametrize("policy", ["wa", "threshold-lru"])
def test_a_floored_policy_ranks_as_itself_or_as_lru(policy: str) -> None:
    config, steps = CONFIGS.get(policy, [{}])[0], workload(1, 120)
    policy_run = simulate(policy, config, steps, PAGE_TOKENS)
    lru_run = simulate("lru", {}, steps, PAGE_TOKENS)
    assert policy_run != lru_run
    assert simulate(policy, config, steps, PAGE_TOKENS, range(0)) == policy_run
    assert simulate(policy, config, steps, PAGE_TOKENS, range(1)) == lru_run


@pytest.mark.parametrize("page_tokens", [4, 16, 64])
@pytest.mark.parametrize(("policy", "config"), CASES, ids=CASE_NAMES)
def test_they_are_equal_at_the_servers_quantum(policy, config, page_tokens):
    check_equal(policy, config, page_tokens, quantum_tokens=TreeSettings().quantum_tokens)


@pytest.mark.parametrize(("policy", "config"), CASES, ids=CASE_NAMES)
def test_the_order_in_which_leaves_are_admitted_changes_no_eviction(policy, config):
    steps = add_samples(workload(1, 80))
    first_run, second_run = (
        serve_live(policy, config, steps, PAGE_TOKENS, (1, seed), quantum_tokens=1)
        for seed in (1, 2)
    )
    assert first_run == second_run
    assert first_run.victims


@pytest.mark.parametrize("policy", ["canopy-lru", "threshold-lru", "wa"])
def test_a_readmitted_leaf_ranks_as_before(policy: str) -> None:
    steps = add_samples(workload(1, 80))
    expected = simulate(policy, {}, steps, PAGE_TOKENS, quantum_tokens=1)
    assert serve_live(policy, {}, steps, PAGE_TOKENS, (1, 1), quantum_tokens=1) == expected
