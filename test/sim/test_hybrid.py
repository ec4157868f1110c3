"""The simulated cache of a hybrid model, and Marconi's, by hand and under random requests."""

import math

import pytest
from hybrid.driver import simulate_marconi, simulate_split, split_memory
from hybrid.marconi import MarconiTree
from hybrid.shape import HybridShape, preset
from hybrid.tree import HybridTree
from hypothesis import given, settings
from hypothesis import strategies as st

from canopy_lab.sim.model import ModelShape
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.policy.states import ORDERS, State, WorthOfStates
from sglang_canopy.records import Request

BLOCK = 4
SHAPE = HybridShape(ModelShape(1, 4, 1, 1, 4, 4), 1, 64, 100)
"""A block of KV holds as much as a state."""


def chained(names: str) -> tuple[int, ...]:
    """Block ids of a prompt; a block is its whole prefix."""
    return tuple(hash(names[: i + 1]) for i in range(len(names)))


def request(names: str, time: float) -> Request:
    return Request(
        time=time, path=chained(names), block_tokens=BLOCK, prompt_tokens=BLOCK * len(names)
    )


def tree(states: int, blocks: int = 100, order: str = "lru", policy: str = "lru") -> HybridTree:
    return HybridTree(make_policy(policy), ORDERS[order](), blocks, states, BLOCK)


def test_a_lookup_ends_at_the_last_state_not_at_the_last_cached_block() -> None:
    cache = tree(8)
    assert cache.access(request("abcd", 0.0)) == 0
    assert cache.access(request("abxy", 1.0)) == 0  # cached to b, but no state there
    assert cache.access(request("abz", 2.0)) == 2  # the second one left it one
    assert cache.access(request("abcde", 3.0)) == 4
    cache.verify()


@pytest.mark.parametrize(
    ("served", "blocks", "found"),
    [
        (["ab", "cd", "ab", "ef"], 4, 2),  # the least recent state is evicted, and a leaf with it
        (["ab", "abcd", "xy"], 6, 0),  # a state with a path below it goes alone
    ],
)
def test_a_state_is_evicted_with_its_leaf_or_alone(
    served: list[str], blocks: int, found: int
) -> None:
    cache = tree(2)
    for at, names in enumerate(served):
        cache.access(request(names, float(at)))
    assert cache.used_blocks == blocks
    assert cache.access(request("abq", 4.0)) == found
    cache.verify()


def test_marconi_keeps_a_state_at_a_fork_and_merges_stateless_nodes() -> None:
    cache = MarconiTree(SHAPE, 10**6, BLOCK, alpha=0.0)
    cache.access(request("abcd", 0.0))
    assert cache.access(request("abxy", 1.0)) == 0
    assert cache.access(request("abz", 2.0)) == 2
    cache.verify()
    small = MarconiTree(SHAPE, 7 * cache.block_bytes + 3 * SHAPE.state_bytes, BLOCK, alpha=0.0)
    small.access(request("ab", 0.0))
    small.access(request("abcd", 1.0))
    small.access(request("wxyz", 2.0))  # 4 blocks: the oldest state, that of ab, is evicted
    assert small.access(request("abcd", 3.0)) == 4
    small.verify()


def test_marconi_with_a_large_alpha_keeps_the_node_that_saves_most_a_byte() -> None:
    room = 12 * SHAPE.kv_bytes_per_token * BLOCK + 3 * SHAPE.state_bytes
    kept = {}
    for alpha in (0.0, 100.0):
        cache = MarconiTree(SHAPE, room, BLOCK, alpha)
        cache.access(request("abcdefgh", 0.0))
        cache.access(request("q", 1.0))
        cache.access(request("rstu", 2.0))
        kept[alpha] = cache.access(request("abcdefghi", 3.0))
    assert kept == {0.0: 0, 100.0: 8}


def test_memory_is_split_into_blocks_and_states() -> None:
    shape = preset("qwen3-next-80b-a3b")
    # 12 layers, 2 heads of 256, keys and values, 2 bytes; 36 states of 32 heads of 128 by 128.
    assert shape.kv_bytes_per_token == 12 * 2 * 256 * 2 * 2
    assert shape.state_bytes == 36 * (4 * 32 * 128 * 128 + 2 * 3 * (2 * 16 + 32) * 128)
    blocks, slots = split_memory(shape, 20 << 30, 64, share=0.5)
    assert math.isclose(slots * shape.state_bytes, (20 << 30) / 3, rel_tol=0.02)
    assert math.isclose(blocks * 64 * shape.kv_bytes_per_token, (20 << 30) / 1.5, rel_tol=0.02)
    with pytest.raises(CanopyError, match="give more"):
        split_memory(shape, 1 << 20, 64)
    with pytest.raises(CanopyError, match="qwen3-next"):
        preset("unknown")


runs = st.lists(
    st.tuples(st.text("abc", min_size=1, max_size=7), st.sampled_from([0.0, 1.0, 90.0])),
    min_size=1,
    max_size=40,
)


def trace_of(steps: list[tuple[str, float]]) -> list[TraceRequest]:
    time, found = 0.0, []
    for names, wait in steps:
        time += wait
        tokens = BLOCK * len(names)
        found.append(TraceRequest(time, tokens, 1, chained(names), BLOCK, turn=len(names)))
    return found


@pytest.mark.parametrize("policy", ["lru", "wa"])
@pytest.mark.parametrize("order", ORDERS)
@given(steps=runs, share=st.sampled_from([0.2, 1.0]))
@settings(max_examples=15)
def test_pools_and_savings_are_right_after_every_request(order, policy, steps, share) -> None:
    result = simulate_split(
        trace_of(steps),
        make_policy(policy),
        ORDERS[order](),
        SHAPE,
        2000,
        share=share,
        verify_every=1,
    )
    assert 0 <= result.token_hits <= result.tokens


@given(steps=runs, alpha=st.sampled_from([0.0, 0.5, 4.0]))
def test_marconis_budget_holds_after_every_request(steps, alpha) -> None:
    result = simulate_marconi(trace_of(steps), SHAPE, 1500, alpha, verify_every=1)
    assert 0 <= result.token_hits <= result.tokens


@given(steps=runs)
def test_with_room_for_all_a_prompt_is_found_to_its_last_known_place(steps) -> None:
    """The oracle: every end and branching point of earlier prompts is a place."""
    cache = tree(10_000, 10_000)
    marconi = MarconiTree(SHAPE, 10**9, BLOCK, 0.0)
    seen: set[str] = set()
    places: set[str] = set()
    for names, _ in steps:
        known = max((n for n in range(len(names) + 1) if names[:n] in places), default=0)
        cached = max(n for n in range(len(names) + 1) if n == 0 or names[:n] in seen)
        assert cache.access(request(names, 0.0)) == known
        assert marconi.access(request(names, 0.0)) == known
        places.update({names[:cached], names})
        seen.update(names[: i + 1] for i in range(len(names)))


def test_the_least_saving_for_its_age_is_evicted_first() -> None:
    order = WorthOfStates()

    def state(saves: float, at: float) -> State:
        made = State(100, at, 0)
        made.saves = saves
        order.admit(made, at)
        return made

    # 64 tokens over the root of 100 s, of 25 s and of 1 s; 512 over the root of 100 s.
    old, newer, newest, large = state(64, 0), state(64, 75), state(64, 99), state(512, 0)
    victims = []
    while (victim := order.victim(100.0)) is not None:
        victims.append(victim)
        order.drop(victim)
    assert victims == [old, newer, large, newest]
