"""Leaves pass to a new policy in slices; the old policy ranks until the last leaf has passed."""

import pytest
from test_exchange import POLICIES, nodes, prompts, to

from sglang_canopy.radix.live_request import NodeLeaf
from support.hybrid_tree import HybridTree
from support.live_tree import LiveTree, check

SLICE = 4
PAIRS = [
    pytest.param(a, b, marks=() if (i + 1) % len(POLICIES) == k else pytest.mark.long)
    for i, a in enumerate(POLICIES)
    for k, b in enumerate(POLICIES)
]
"""Before and after. Each policy is once on each side in the default run."""


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr("sglang_canopy.radix.exchange.SLICE_NODES", SLICE)


def filled(policy: str, tokens: int = 4096) -> LiveTree:
    tree = LiveTree(tokens, policy, {"quantum_tokens": 1})
    for path, time, _ in prompts(3, 120):
        tree.serve(path, time)
    tree.core.evictable_device_leaves.admit_pending()
    return tree


def is_ranked_by(tree: LiveTree, name: str) -> bool:
    live, leaves = tree.core.live, tree.core.evictable_device_leaves
    assert live.device_policy is leaves.policy
    return leaves.policy is leaves.next_policy and type(leaves.policy).name == name


def evict_all(tree: LiveTree) -> list[list[int]]:
    """The tokens of the victims, in the order in which they are evicted."""
    order = []
    while (
        choice := tree.core.evictable_device_leaves.next_victim(tree.core.clock.now)
    ) is not None:
        order.append(list(choice[0].key.token_ids))
        tree.evict(len(choice[0].key) - choice[1])
    return order


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_until_all_leaves_have_passed_the_victims_are_those_of_the_policy_before(before, after):
    exchanged, plain = filled(before), filled(before)
    exchanged.core.exchange.apply(to(after), "test")
    exchanged.request(130.0)
    plain.request(130.0)
    check(exchanged)
    assert (
        exchanged.core.live.device_policy is not exchanged.core.evictable_device_leaves.next_policy
    )
    assert evict_all(exchanged) == evict_all(plain)


@pytest.mark.parametrize("before", POLICIES)
def test_afterwards_they_are_those_of_a_tree_that_always_had_the_new_policy(before):
    exchanged, plain = filled(before), filled("canopy-lru")
    exchanged.core.exchange.apply(to("canopy-lru"), "test")
    for number in range(len(exchanged.core._node_arena) // SLICE):
        assert not is_ranked_by(exchanged, "lru")
        for tree in (exchanged, plain):
            tree.serve([5000 + number, 1, 2], 130.0 + number)
        check(exchanged)
    for number in range(100):
        for tree in (exchanged, plain):
            tree.request(500.0 + number)
    assert is_ranked_by(exchanged, "lru")
    check(exchanged)
    assert evict_all(exchanged) == evict_all(plain)


def test_an_arrival_passes_on_one_slice_and_no_more(monkeypatch):
    tree = filled("wa")
    tree.core.exchange.apply(to("canopy-lru"), "test")
    policy, passed = tree.core.evictable_device_leaves.next_policy, []
    admit = policy.admit
    monkeypatch.setattr(policy, "admit", lambda leaf, now: passed.append(leaf) or admit(leaf, now))
    arrivals = 0
    while not is_ranked_by(tree, "lru"):
        before = len(passed)
        tree.request(130.0 + arrivals)
        arrivals += 1
        assert len(passed) - before <= SLICE
    assert arrivals <= len(tree.core._node_arena) // SLICE + 1


def exchanged_and_passed_on(before: str, after: str) -> LiveTree:
    """A tree whose new policy has just begun to rank."""
    tree = filled(before)
    tree.core.exchange.apply(to(after), "test")
    while not is_ranked_by(tree, type(tree.core.evictable_device_leaves.next_policy).name):
        tree.request(tree.core.clock.now + 1.0)
    return tree


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_no_arrival_settles_or_releases_more_than_a_slice(before, after):
    tree = filled(before)
    old = tree.core.evictable_device_leaves.policy
    tree.core.exchange.apply(to(after), "test")
    new = tree.core.evictable_device_leaves.next_policy
    leaves = [node.canopy for node in tree.core._node_arena.values()]
    settled, held = 0, len(list(old.leaves()))
    while tree.core.exchange.handing_over:
        tree.request(tree.core.clock.now + 1.0)
        settled_before, settled = settled, sum(leaf.policy is new for leaf in leaves)
        held_before, held = held, len(list(old.leaves()))
        assert settled - settled_before <= SLICE
        assert held_before - held <= 2 * SLICE
    assert settled == len(list(new.leaves())) > 3 * SLICE
    assert not held
    check(tree)


@pytest.mark.parametrize("after", POLICIES)
@pytest.mark.parametrize(
    "arrivals", [0, 9, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 5))]
)
def test_while_leaves_settle_the_victims_are_those_of_the_new_policy(after, arrivals):
    tree, settled = (exchanged_and_passed_on("canopy-lru", after) for _ in range(2))
    for _ in range(arrivals):
        tree.request(tree.core.clock.now + 1.0)
    assert tree.core.exchange.handing_over
    while settled.core.exchange.handing_over:
        settled.request(settled.core.clock.now + 1.0)
    check(tree)
    assert evict_all(tree) == evict_all(settled)


@pytest.mark.parametrize("after", POLICIES)
def test_an_exchange_while_leaves_settle(after):
    tree = exchanged_and_passed_on("wa", "canopy-tlru")
    tree.serve([7000, 1, 2], tree.core.clock.now + 1.0)
    tree.core.exchange.apply(to(after), "test")
    tree.serve([8000, 1, 2], tree.core.clock.now + 1.0)
    check(tree)
    held = nodes(tree)
    while tree.core.exchange.handing_over:
        tree.request(tree.core.clock.now + 1.0)
        check(tree)
    assert {type(node.canopy) for node in tree.core._node_arena.values()} == {NodeLeaf}
    assert nodes(tree) == held


def test_a_second_exchange_replaces_one_that_is_not_finished():
    tree = filled("wa")
    tree.core.exchange.apply(to("canopy-tlru"), "test")
    tree.request(130.0)
    tree.core.exchange.apply(to("threshold-lru"), "test")
    held = nodes(tree)
    for number in range(200):
        tree.request(131.0 + number)
        check(tree)
    assert is_ranked_by(tree, "threshold-lru")
    assert tree.core.live.running == "threshold-lru"
    assert nodes(tree) == held


def test_after_a_flush_the_new_policy_ranks_at_once():
    tree = filled("wa")
    tree.core.exchange.apply(to("canopy-lru"), "test")
    tree.cache.reset()
    tree.allocator.clear()
    assert is_ranked_by(tree, "lru")
    tree.serve([1, 2, 3], 130.0)
    check(tree)


# ---- hybrid models: leaves that no request can use ----


def with_unusable_leaves(policy: str) -> tuple[HybridTree, list[int]]:
    tree = HybridTree("mamba", policy, kv_size=96)
    first = tree.steps._make_seq(1, 6)
    tree.serve(first, 1.0)
    tree.serve([*first, *tree.steps._make_seq(500, 4)], 2.0)
    tree.evict(mamba=1)
    tree.evict(full=4)
    tree.core.evictable_device_leaves.admit_pending()
    assert len(tree.core.evictable_device_leaves.unusable)
    return tree, first


@pytest.mark.parametrize("policy", POLICIES)
def test_leaves_that_no_request_can_use_stay_apart(policy):
    tree, _ = with_unusable_leaves("wa")
    tree.core.exchange.apply(to(policy), "test")
    tree.recount()
    tree.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_next_victim_is_a_leaf_whatever_was_exchanged_at_an_arrival(policy):
    tree, first = with_unusable_leaves("wa")
    arrive = tree.core.requests.arrive

    def arrive_and_exchange(request):
        arrive(request)
        tree.core.exchange.apply(to(policy), "floor")

    tree.core.requests.arrive = arrive_and_exchange
    tree.serve([*first, *tree.steps._make_seq(900, 6)], 3.0)
    tree.core.requests.arrive = arrive
    leaves = tree.core.evictable_device_leaves
    choice = leaves.next_victim(tree.core.clock.now)
    assert choice is None or choice[0] in leaves, "the next victim has children, or is locked"
    tree.evict(full=4)
    tree.recount()
    for number in range(20):
        tree.serve(tree.steps._make_seq(2000 + 50 * number, 10), 5.0 + number)
        tree.recount()
    tree.close()


def split_the_longest_leaf(tree: LiveTree) -> None:
    """Look up the first half of the longest evictable leaf, as a request that is never admitted does."""
    leaf = max(tree.core.evictable_device_leaves, key=lambda n: (len(n.key), -n.canopy.number))
    path, node = [], leaf
    while node is not tree.core.root_node:
        path[:0] = node.key.token_ids
        node = node.parent
    tree.match(path[: len(path) - len(leaf.key) // 2])


@pytest.mark.parametrize("change", [*map(to, POLICIES), to("canopy-tlru", threshold_tokens=4)])
def test_a_leaf_split_while_leaves_settle_is_ranked_by_the_rest_of_it(change):
    tree, settled = (filled("canopy-lru") for _ in range(2))
    for each in (tree, settled):
        each.core.exchange.apply(change, "test")
        leaves = each.core.evictable_device_leaves
        while leaves.policy is not leaves.next_policy:
            each.request(each.core.clock.now + 1.0)
    assert tree.core.exchange.handing_over
    while settled.core.exchange.handing_over:
        settled.request(settled.core.clock.now + 1.0)
    for each in (tree, settled):
        split_the_longest_leaf(each)
    check(tree)
    kept = [kept_tokens(each) for each in (tree, settled)]
    assert kept[0] == kept[1]
    assert evict_all(tree) == evict_all(settled)


def kept_tokens(tree: LiveTree) -> list[tuple[tuple[int, ...], int]]:
    """Return the tokens of each leaf, and the number that T-LRU keeps."""
    leaves = tree.core.evictable_device_leaves.policy.leaves()
    slots = [(tuple(leaf.node.key.token_ids), leaf.slot) for leaf in leaves]
    return sorted((tokens, slot[2] if slot and len(slot) == 3 else 0) for tokens, slot in slots)
