"""Device and host together: the system simulator's tree and SGLang's cache have the same KV.

Both are fed the same requests, one at a time; each must hit as much, on device and host together.
"""

import pytest
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from canopy_lab.sim.system.nodes import TierNode
from canopy_lab.sim.system.tree import TieredTree
from sglang_canopy.policy.registry import live_names, make_policy
from sglang_canopy.records import Request
from support.live_tree import LiveTree, check
from support.parity import PAGE, add_samples, chained_path, fields, serve_from_tiers, workload
from support.policy_rules import Readmission

DEVICE_BLOCKS, HOST_BLOCKS = 60, 130
State = tuple[int, int, int, int]
"""Tokens hit on the device and on the host, and tokens on each afterwards."""


class SeparateCuts(TieredTree):
    """A part cut off a node stays a separate node on the host, as on a server.

    The simulator merges it into the node below, which saves most of its nodes; a cut of a
    quantum then reaches further into one node than into each of two.
    """

    def _hand_down(self, node: TierNode, kept: int) -> bool:
        return False


def simulate(
    policy: str,
    page: int,
    quantum: int,
    steps: list[dict],
    host_tokens: int,
    tiered: type[TieredTree],
) -> list[State]:
    device = make_policy(policy, {})
    tree = tiered(
        device, DEVICE_BLOCKS * page, page, host_policy=device.twin(), host_tokens=host_tokens,
        quantum_tokens=quantum,
    )  # fmt: skip
    states = []
    for number, step in enumerate(steps):
        path = chained_path(step)
        tokens = len(path) * page
        request = Request(
            time=step["time"], path=path, block_tokens=page, prompt_tokens=tokens, **fields(step)
        )
        tree.now = max(tree.now, request.time)
        request.label = tree.device_policy.arrive(request)
        tree.host_policy.arrive(request)
        hit = tree.match(path)
        request.cached_tokens = hit.device_tokens
        request.label = tree.device_policy.finish(request)
        tree.host_policy.finish(request)
        tree.lock(hit.node)
        load = hit.tokens - hit.device_tokens
        if load:
            missing = load - tree.free
            if missing > 0:
                tree.evict_device(missing)
            tree.load(hit.node)
        tree.claim(tokens - hit.tokens)
        leaf, _ = tree.insert(path, len(path), tokens, hit.node)
        tree.lock(leaf, hit.node)
        tree.mark_used(leaf, request, number)
        tree.back_up(leaf)
        tree.unlock(leaf)
        tree.verify()
        states.append((hit.device_tokens, load, tree.device_used, tree.host_used))
    return states


def serve_live(
    policy: str, page: int, quantum: int, steps: list[dict], readmit: tuple[int, int] | None = None
) -> tuple[list[State], int]:
    """Return the states after each request, and the host pool's size in tokens, which SGLang rounds up.
    ``readmit``: seeds that draw which leaves are re-admitted before each request, and in which order."""
    settings = {"quantum_tokens": quantum, "block_tokens": page}
    tree = LiveTree(
        DEVICE_BLOCKS * page, policy, settings, page_size=page, host_tokens=HOST_BLOCKS * page,
        write_policy="write_through",
    )  # fmt: skip
    states = []
    readmission = None if readmit is None else Readmission(tree.core, *readmit)
    for step in steps:
        if readmission is not None:
            readmission()
        hit = serve_from_tiers(tree, step, page)
        check(tree)
        device = host = 0
        for node in tree.core._node_arena.values():
            data = node.component_data[ComponentType.FULL]
            device += 0 if data.value is None else len(data.value)
            host += 0 if data.host_value is None else len(data.host_value)
        states.append((hit.device_prefix_len, hit.host_hit_length, device, host))
    return states, tree.cache.cache_controller.mem_pool_host.size


def hit_tokens(states: list[State]) -> list[int]:
    return [device + host for device, host, _, _ in states]


@pytest.mark.parametrize(("page", "quantum"), [(4, 1), (4, 64), (16, 64), (64, 64)])
@pytest.mark.parametrize("policy", ["canopy-lru", "wa"])
def test_every_request_hits_as_much_on_device_and_host(policy, page, quantum):
    steps = workload(1, 150)
    live, host_tokens = serve_live(policy, page, quantum, steps)
    simulated, merged = (
        simulate(policy, page, quantum, steps, host_tokens, tiered)
        for tiered in (SeparateCuts, TieredTree)
    )
    assert hit_tokens(simulated) == hit_tokens(live)
    assert sum(hit_tokens(merged)) == pytest.approx(sum(hit_tokens(live)), rel=0.01)
    if quantum == 1:
        assert hit_tokens(merged) == hit_tokens(live)
    assert sum(host for _, host, _, _ in simulated) > 0
    assert max(tokens for _, _, _, tokens in simulated) > (HOST_BLOCKS - 6) * page


@pytest.mark.parametrize("policy", live_names())
def test_the_order_in_which_leaves_are_admitted_decides_nothing(policy: str) -> None:
    steps = add_samples(workload(1, 60))
    first, second = (serve_live(policy, PAGE, 1, steps, (1, order)) for order in (1, 2))
    assert first == second
