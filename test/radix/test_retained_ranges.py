"""Ranges of a prompt with priority and duration, on the nodes of the live tree."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_canopy.request.retention import ANSWER, TIERS, Retention, to_wire
from support.live_tree import LiveTree, check, fake_req

PAGE = 4
PROMPT = list(range(100, 140))
ANSWERED = [500, 501, 502, 503]


def ask(tree: LiveTree, prompt: list[int], time: float, *wishes: Retention, **stamp: object):
    custom = {"canopy": {"time": time, **stamp}, "canopy-retention": to_wire(wishes)}
    req = fake_req(prompt, ANSWERED)
    req.sampling_params.custom_params = custom
    request = tree.core.request_of(req)
    tree.core.finish_request(req)
    tree.insert([*prompt, *ANSWERED], request)
    return request


def tree_of(**config: object) -> LiveTree:
    return LiveTree(400, "wa", {"quantum_tokens": 1, "keep_tenant_share": 0.5, **config}, PAGE)


def nodes(tree: LiveTree) -> list:
    return [n for n in tree.core._node_arena.values() if n is not tree.core.root_node]


def test_only_the_range_is_kept_to_the_page() -> None:
    tree = tree_of()
    ask(tree, PROMPT, 1.0, Retention(("device",), 80, 60.0, 0, 18))
    ask(tree, [9] * 40, 2.0)
    tree.evict(72)
    assert tree.match(PROMPT) == 16
    assert tree.core.keeps.budget.tokens == 16
    check(tree)
    ask(tree, [8], 100.0)
    tree.evict(400)
    assert tree.match(PROMPT) == 0


def test_a_released_range_goes_first_and_the_rest_stays() -> None:
    tree = tree_of()
    ask(tree, [9] * 40, 1.0)
    ask(tree, PROMPT, 2.0, Retention(("device",), 0, 60.0, 20))
    tree.evict(24)
    assert tree.match(PROMPT) == 20
    assert tree.match([9] * 40) == 40
    check(tree)


def test_the_answer_is_a_range_too() -> None:
    tree = tree_of()
    ask(tree, [9] * 40, 1.0)
    ask(tree, PROMPT, 2.0, Retention(("device",), 10, 60.0, ANSWER))
    tree.evict(4)
    assert tree.match([*PROMPT, *ANSWERED]) == 40
    assert tree.match([9] * 40) == 40


def test_lifetimes_below_the_device_are_those_of_the_range() -> None:
    tree = tree_of()
    ordinary = Retention(("host", "disk"), 35, 300.0, 0, 20)
    pinned = Retention(("disk",), 90, 50.0, 8, 12)
    ask(tree, PROMPT, 1.0, ordinary, pinned)
    found = {
        (n.canopy.offset, n.canopy.offset + n.canopy.length): (n.canopy.ttl_s, n.canopy.pin_until)
        for n in nodes(tree)
    }
    assert found == {
        (0, 8): (300.0, 51.0),
        (8, 12): (300.0, 51.0),
        (12, 20): (300.0, None),
        (20, 44): (None, None),
    }
    check(tree)


def test_a_tenant_keeps_its_share_however_many_ranges_it_asks_for() -> None:
    tree = tree_of(keep_tenant_share=0.1)
    for n in range(8):
        prompt = list(range(1000 * n, 1000 * n + 40))
        ask(tree, prompt, float(n), *[Retention(TIERS, 100, 3600.0, 0, e) for e in (8, 16, 24)])
    assert 0 < tree.core.keeps.budget.tokens <= 40
    tree.core.keeps.check(n.canopy for n in nodes(tree))
    check(tree)


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_splits_for_ranges_are_sound_while_copies_to_the_host_are_under_way(write_policy) -> None:
    tree = LiveTree(
        200, "wa", {"quantum_tokens": 1}, PAGE, host_tokens=400, write_policy=write_policy
    )
    for n in range(12):
        prompt = [*PROMPT[:16], *range(1000 * n, 1000 * n + 24)]
        ask(tree, prompt, float(n), Retention(TIERS, 60, 30.0, 0, 24), Retention(TIERS, 0, 1.0, 30))
        check(tree)
    tree.load_back([*PROMPT[:16], *range(24)])
    check(tree)


WISH = st.builds(
    Retention,
    st.sampled_from([("device",), ("host", "disk"), ("disk",), TIERS]),
    st.integers(0, 100),
    st.floats(0, 100),
    st.integers(ANSWER, 9),
    st.none() | st.integers(10, 30),
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=1, max_size=24),
            st.lists(WISH, max_size=4),
            st.integers(0, 30),
        ),
        max_size=15,
    )
)
def test_any_ranges_leave_the_tree_sound_and_within_budget(asked: list) -> None:
    tree = LiveTree(128, "wa", {"quantum_tokens": 1, "keep_tenant_share": 0.2}, PAGE)
    for n, (prompt, wishes, evicted) in enumerate(asked):
        ask(tree, prompt, 10.0 * n, *wishes)
        tree.evict(evicted)
        check(tree)
        tree.core.keeps.check(node.canopy for node in nodes(tree))
        assert tree.core.keeps.budget.tokens <= 25
