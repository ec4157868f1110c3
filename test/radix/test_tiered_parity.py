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
from support.live_tree import LiveTree, check
from support.parity import PAGE_TOKENS, add_samples, chained_path, labels_of, serve_tiers, workload
from support.policy_rules import Readmission

DEVICE_BLOCKS, HOST_BLOCKS = 60, 130


class State(NamedTuple):
    """Tokens hit on the device and on the host, and tokens on each afterwards."""

    device_hit_tokens: int
    host_hit_tokens: int
    on_device: int
    on_host: int


class SeparateCuts(TieredTree):
    """A part cut off a node stays a separate node on the host, as on a server.

    The simulator merges it into the node below, which saves most of its nodes; a cut of a
    quantum then reaches further into one node than into each of two.
    """

    def _hand_down(self, node: TierNode, kept_blocks: int) -> bool:
        return False


def simulate(
    policy: str,
    page_tokens: int,
    quantum_tokens: int,
    steps: list[dict],
    host_tokens: int,
    tree_class: type[TieredTree],
) -> list[State]:
    device_policy = make_policy(policy, {})
    tree = tree_class(
        device_policy, DEVICE_BLOCKS * page_tokens, page_tokens, host_policy=device_policy.twin(), host_tokens=host_tokens,
        quantum_tokens=quantum_tokens,
    )  # fmt: skip
    states = []
    for number, step in enumerate(steps):
        path = chained_path(step)
        tokens = len(path) * page_tokens
        fields = {"path": path, "block_tokens": page_tokens, **labels_of(step)}
        request = Request(time=step["time"], prompt_tokens=tokens, **fields)
        tree.now = max(tree.now, request.time)
        request.label = tree.device_policy.arrive(request)
        tree.host_policy.arrive(request)
        hit = tree.match(path)
        request.cached_tokens = hit.device_tokens
        request.label = tree.device_policy.finish(request)
        tree.host_policy.finish(request)
        tree.lock(hit.node)
        loaded = hit.tokens - hit.device_tokens
        if loaded:
            if loaded > tree.free_tokens:
                tree.evict_device(loaded - tree.free_tokens)
            tree.load(hit.node)
        tree.claim(tokens - hit.tokens)
        leaf, _ = tree.insert(path, len(path), tokens, hit.node)
        tree.lock(leaf, hit.node)
        tree.mark_used(leaf, request, number)
        tree.back_up(leaf)
        tree.unlock(leaf)
        tree.verify()
        states += [State(hit.device_tokens, loaded, tree.device_used_tokens, tree.host_used_tokens)]
    return states


def serve_live(
    policy: str,
    page_tokens: int,
    quantum_tokens: int,
    steps: list[dict],
    readmission_seeds: tuple[int, int] | None = None,
) -> tuple[list[State], int]:
    """Return the states after each request, and the tokens of the host pool, which SGLang rounds up.
    ``readmission_seeds``: they draw the leaves re-admitted before each request, and their order."""
    settings = {"quantum_tokens": quantum_tokens, "block_tokens": page_tokens}
    tree = LiveTree(
        DEVICE_BLOCKS * page_tokens, policy, settings, page_size=page_tokens, host_tokens=HOST_BLOCKS * page_tokens,
        write_policy="write_through",
    )  # fmt: skip
    states = []
    readmission = None
    if readmission_seeds is not None:
        readmission = Readmission(tree.core, *readmission_seeds)
    for step in steps:
        if readmission is not None:
            readmission()
        hit = serve_tiers(tree, step, page_tokens)
        check(tree)
        on_device = on_host = 0
        for node in tree.core._node_arena.values():
            data = node.component_data[ComponentType.FULL]
            on_device += 0 if data.value is None else len(data.value)
            on_host += 0 if data.host_value is None else len(data.host_value)
        states.append(State(hit.device_prefix_len, hit.host_hit_length, on_device, on_host))
    return states, tree.cache.cache_controller.mem_pool_host.size


def hit_tokens(states: list[State]) -> list[int]:
    return [state.device_hit_tokens + state.host_hit_tokens for state in states]


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
    assert sum(state.host_hit_tokens for state in simulated) > 0
    assert max(state.on_host for state in simulated) > (HOST_BLOCKS - 6) * page_tokens


@pytest.mark.parametrize("policy", live_names())
def test_the_order_in_which_leaves_are_admitted_decides_nothing(policy: str) -> None:
    steps = add_samples(workload(1, 60))
    first, second = (serve_live(policy, PAGE_TOKENS, 1, steps, (1, seed)) for seed in (1, 2))
    assert first == second
