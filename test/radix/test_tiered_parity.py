"""Device and host together: the system simulator's tree and SGLang's cache have the same KV.

Both are fed the same requests, one at a time; each must hit as much, on device and host together.
"""

from typing import NamedTuple

import pytest
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from canopy_lab.sim.system.nodes import TierNode
from canopy_lab.sim.system.tree import TieredTree
from sglang_canopy.policy.registry import live_names, make_policy
from sglang_canopy.records import Request
from support.live_tree import LiveTree, check_tree
from support.parity import PAGE_TOKENS, add_samples, chained_path, fields_of, serve_tiers, workload
from support.policy_rules import Readmission

DEVICE_BLOCKS, HOST_BLOCKS = 60, 130


class TierTokens(NamedTuple):
    """Tokens hit on the device and on the host, and tokens on each afterwards."""

    device_hit_tokens: int
    host_hit_tokens: int
    on_device: int
    on_host: int


class SeparateCuts(TieredTree):
    """A tree in which a part cut off a node stays a separate node on the host, as on a server.

    The simulator merges it into the node below, which saves most of its nodes; a cut of a quantum
    then reaches further into one node than into each of two."""

    def _hand_down(self, node: TierNode, kept_blocks: int) -> bool:
        return False


def simulate(
    policy: str,
    page_tokens: int,
    quantum_tokens: int,
    steps: list[dict],
    host_tokens: int,
    tree_class: type[TieredTree],
) -> list[TierTokens]:
    device_policy = make_policy(policy, {})
    tree = tree_class(
        device_policy, DEVICE_BLOCKS * page_tokens, page_tokens, host_policy=device_policy.twin(), host_tokens=host_tokens,
        quantum_tokens=quantum_tokens,
    )  # fmt: skip
    outcomes = []
    for number, step in enumerate(steps):
        path = chained_path(step)
        prompt_tokens = len(path) * page_tokens
        fields = {"path": path, "block_tokens": page_tokens, **fields_of(step)}
        request = Request(time=step["time"], prompt_tokens=prompt_tokens, **fields)
        tree.now = max(tree.now, request.time)
        request.label = tree.device_policy.arrive(request)
        tree.host_policy.arrive(request)
        match = tree.match(path)
        request.cached_tokens = match.device_tokens
        request.label = tree.device_policy.finish(request)
        tree.host_policy.finish(request)
        tree.lock(match.node)
        host_hit_tokens = match.tokens - match.device_tokens
        if host_hit_tokens:
            if host_hit_tokens > tree.free_tokens:
                tree.evict_device(host_hit_tokens - tree.free_tokens)
            tree.load(match.node)
        tree.claim(prompt_tokens - match.tokens)
        leaf, _ = tree.insert(path, len(path), prompt_tokens, match.node)
        tree.lock(leaf, match.node)
        tree.mark_used(leaf, request, number)
        tree.back_up(leaf)
        tree.unlock(leaf)
        tree.verify()
        hits = match.device_tokens, host_hit_tokens
        outcomes.append(TierTokens(*hits, tree.device_used_tokens, tree.host_used_tokens))
    return outcomes


def serve_live(
    policy: str,
    page_tokens: int,
    quantum_tokens: int,
    steps: list[dict],
    readmission_seeds: tuple[int, int] | None = None,
) -> tuple[list[TierTokens], int]:
    """Return the outcomes after each request, and the tokens of the host pool, which SGLang rounds up.
    ``readmission_seeds``: seeds of the leaves re-admitted before each request, and of their order."""
    policy_config = {"quantum_tokens": quantum_tokens, "block_tokens": page_tokens}
    tree = LiveTree(
        DEVICE_BLOCKS * page_tokens, policy, policy_config, page_size=page_tokens, host_tokens=HOST_BLOCKS * page_tokens,
        write_policy="write_through",
    )  # fmt: skip
    outcomes = []
    readmission = None
    if readmission_seeds is not None:
        readmission = Readmission(tree.core, *readmission_seeds)
    for step in steps:
        if readmission is not None:
            readmission()
        match = serve_tiers(tree, step, page_tokens)
        check_tree(tree)
        on_device = on_host = 0
        for node in tree.core._node_arena.values():
            kv = node.component_data[ComponentType.FULL]
            on_device += 0 if kv.value is None else len(kv.value)
            on_host += 0 if kv.host_value is None else len(kv.host_value)
        hits = match.device_prefix_len, match.host_hit_length
        outcomes.append(TierTokens(*hits, on_device, on_host))
    return outcomes, tree.cache.cache_controller.mem_pool_host.size


def hit_tokens(outcomes: list[TierTokens]) -> list[int]:
    return [outcome.device_hit_tokens + outcome.host_hit_tokens for outcome in outcomes]


@pytest.mark.parametrize(("page_tokens", "quantum_tokens"), [(4, 1), (4, 64), (16, 64), (64, 64)])
@pytest.mark.parametrize("policy", ["canopy-lru", "wa"])
def test_every_request_hits_as_much_on_device_and_host(policy, page_tokens, quantum_tokens):
    steps = workload(1, 150)
    live, host_tokens = serve_live(policy, page_tokens, quantum_tokens, steps)
    simulated = simulate(policy, page_tokens, quantum_tokens, steps, host_tokens, SeparateCuts)
    merged = simulate(policy, page_tokens, quantum_tokens, steps, host_tokens, TieredTree)
    assert hit_tokens(simulated) == hit_tokens(live)
    assert sum(hit_tokens(merged)) == pytest.approx(sum(hit_tokens(live)), rel=0.01)
    if quantum_tokens == 1:
        assert hit_tokens(merged) == hit_tokens(live)
    assert sum(outcome.host_hit_tokens for outcome in simulated) > 0
    assert max(outcome.on_host for outcome in simulated) > (HOST_BLOCKS - 6) * page_tokens


@pytest.mark.parametrize("policy", live_names())
def test_the_order_in_which_leaves_are_admitted_changes_no_eviction(policy: str) -> None:
    steps = add_samples(workload(1, 60))
    runs = [serve_live(policy, PAGE_TOKENS, 1, steps, (1, seed)) for seed in (1, 2)]
    assert runs[0] == runs[1]
