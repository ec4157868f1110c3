import pytest

from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.policy.structures import reranking
from sglang_canopy.records import Leaf, Request


def serve(tree, path, time, output=0, **said):
    """Serve one request of one-token blocks; returns its uncached tokens."""
    request = Request(
        time=time, path=tuple(path), prompt_tokens=len(path), output_tokens=output, **said
    )
    return len(path) - tree.access(request)


def conversation(name, length):
    return [name * 1000 + i for i in range(length)]


def worst_next_turn(name, options):
    """Figure 1 of arXiv 2510.15152: A and B of 100 blocks each, whose next turns add 100."""
    waits = []
    for asked in (1, 2):
        policy = make_policy(name, options)
        tree = RadixTree(policy, 100, 1)
        if name == "canopy-tlru":  # another conversation has shown that a turn adds 100 tokens
            teacher = RadixTree(policy, 10_000, 1)
            serve(teacher, conversation(9, 100), 0.0)
            serve(teacher, conversation(9, 200), 1.0)
            policy.model.fit(1.0)
            for leaf in list(policy.leaves()):
                policy.drop(leaf)
        serve(tree, conversation(1, 100), 2.0)
        serve(tree, conversation(2, 100), 3.0)
        waits.append(serve(tree, conversation(asked, 200), 4.0))
        tree.verify()
    return max(waits)


def test_figure_1_of_the_paper_worst_case_150_instead_of_200():
    assert worst_next_turn("lru", {}) == 200
    tail = {"threshold_tokens": 150, "caching": "optional"}
    assert worst_next_turn("canopy-tlru", tail) == 150


def test_a_server_that_must_cache_what_it_serves_cannot_reach_it():
    assert worst_next_turn("canopy-tlru", {"threshold_tokens": 150}) == 200


def test_figure_1_where_room_is_made_after_the_request_as_algorithm_1_does():
    waits = []
    for asked in (1, 2):
        options = {"threshold_tokens": 150, "next_prompt_tokens": 100}
        tree = RadixTree(make_policy("canopy-tlru", options), 100, 1, optional_caching=True)
        serve(tree, conversation(1, 100), 2.0)
        serve(tree, conversation(2, 100), 3.0)
        waits.append(serve(tree, conversation(asked, 200), 4.0))
        tree.verify()
    assert waits == [150, 150]


def leaf_of(policy, history, length, offset=0, time=0.0):
    leaf = Leaf(offset, length)
    leaf.history, leaf.last_access = history, time
    policy.admit(leaf, time)
    return leaf


def test_trims_a_leaf_at_the_budget():
    policy = make_policy("canopy-tlru", {"threshold_tokens": 60})
    leaf = leaf_of(policy, history=100, length=100)
    # No prompt growth is known yet: 100 + 0 - 60 tokens are needed.
    assert policy.victim(0.0) == (leaf, 40)


def test_a_fixed_estimate_is_planned_for_whatever_was_seen():
    policy = make_policy("canopy-tlru", {"threshold_tokens": 60, "next_prompt_tokens": 25})
    tree = RadixTree(policy, 10_000, 1)
    serve(tree, conversation(9, 100), 0.0)
    serve(tree, conversation(9, 900), 1.0)  # another conversation grows by 800
    policy.model.fit(1.0)
    for leaf in list(policy.leaves()):
        policy.drop(leaf)
    leaf = leaf_of(policy, history=100, length=100)
    assert policy.victim(2.0) == (leaf, 100 + 25 - 60)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"next_prompt_tokens": -1.0}, "'next_prompt_tokens' must be at least 0, got -1.0"),
        (
            {"next_prompt_tokens": 5.0, "growth_quantile": 0.5},
            "only one of 'growth_quantile' and 'next_prompt_tokens'",
        ),
    ],
)
def test_a_fixed_estimate_is_checked(options, said):
    with pytest.raises(CanopyError, match=said):
        make_policy("canopy-tlru", options)


def test_free_tokens_of_a_young_leaf_go_before_needed_ones_of_an_old_leaf():
    policy = make_policy("canopy-tlru", {"threshold_tokens": 60})
    leaf_of(policy, history=200, length=100, time=1.0)
    young = leaf_of(policy, history=100, length=100, time=9.0)
    assert policy.victim(10.0) == (young, 40)


def test_without_free_tokens_it_is_lru():
    policy = make_policy("canopy-tlru", {"threshold_tokens": 10})
    old = leaf_of(policy, history=200, length=100, time=1.0)
    leaf_of(policy, history=200, length=100, time=2.0)
    assert policy.victim(10.0) == (old, 0)


def test_a_leaf_beyond_the_budget_goes_whole():
    policy = make_policy("canopy-tlru", {"threshold_tokens": 60})
    leaf = leaf_of(policy, history=100, length=50, offset=50)
    assert policy.victim(0.0) == (leaf, 0)


def test_the_target_in_milliseconds_becomes_tokens_through_the_ttft_model():
    policy = make_policy("canopy-tlru", {"ttft_ms": 110.0})
    request = Request(time=0.0, path=(1,), prompt_tokens=1, ttft_model=(0.001, 0.05))
    request.label = policy.arrive(request)
    policy.finish(request)
    assert policy.stats()["threshold_tokens"] == pytest.approx(60.0)
    leaf = leaf_of(policy, history=100, length=100)
    assert policy.victim(0.0) == (leaf, 40)


def test_a_change_of_the_threshold_plans_admitted_leaves_again():
    policy = make_policy("canopy-tlru", {"ttft_ms": 110.0})
    leaf = leaf_of(policy, history=100, length=100)
    assert policy.victim(0.0) == (leaf, 0)  # no model yet: LRU
    request = Request(time=0.0, path=(1,), prompt_tokens=1, ttft_model=(0.001, 0.05))
    request.label = policy.arrive(request)
    policy.finish(request)
    assert policy.victim(0.0) == (leaf, 40)


def test_a_requests_own_target_goes_before_the_policys():
    policy = make_policy("canopy-tlru", {"ttft_ms": 110.0})
    request = Request(time=0.0, path=(1,), prompt_tokens=1, ttft_model=(0.001, 0.05))
    request.label = policy.arrive(request)
    policy.finish(request)
    leaf = Leaf(0, 100)
    leaf.history, leaf.slo_ms = 100, 80.0
    policy.admit(leaf, 0.0)
    assert policy.victim(0.0) == (leaf, 70)


def test_a_percentile_of_what_is_observed_sets_the_threshold():
    policy = make_policy("canopy-tlru", {"ttft_percentile": 50.0})
    for tokens in (10, 20, 30, 40, 50):
        request = Request(time=0.0, path=(tokens,), prompt_tokens=tokens, cached_tokens=0)
        request.label = policy.arrive(request)
        policy.finish(request)
    assert policy.stats()["threshold_tokens"] == 30.0


def test_plans_for_the_growth_of_the_leafs_own_category():
    policy = make_policy("canopy-tlru", {"threshold_tokens": 50})
    tree = RadixTree(policy, 100_000, 1)
    for n in range(1, 41):
        kind, adds = ("long", 90) if n % 2 else ("short", 10)
        serve(tree, conversation(n, 100), 10.0 * n, category=kind)
        serve(tree, conversation(n, 100 + adds), 10.0 * n + 1, category=kind)
    policy.model.fit(500.0)
    long, short = (f"{kind}|-|turn1|out<64" for kind in ("long", "short"))
    assert policy.next_tokens(long) == 90
    assert policy.next_tokens(short) == 10


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"ttft_ms": -1.0}, "ttft_ms"),
        ({"ttft_percentile": 100.0}, "ttft_percentile"),
        ({"threshold_tokens": 5.0, "ttft_ms": 5.0}, "only one"),
        ({"growth_quantile": 1.0}, "growth_quantile"),
        ({"caching": "never"}, "caching"),
    ],
)
def test_refuses_bad_options_by_name(options, names):
    with pytest.raises(CanopyError, match=names):
        make_policy("canopy-tlru", options)


@pytest.mark.parametrize("name", ["canopy-tlru", "etlru"])
@pytest.mark.parametrize("slices", [0, 1])
def test_a_policy_that_ends_while_it_ranks_anew_is_released_in_slices(monkeypatch, name, slices):
    monkeypatch.setattr(reranking, "SLICE_LEAVES", 4)
    policy = make_policy(name, {"ttft_percentile": 50.0})
    leaves = [leaf_of(policy, history=100, length=10, time=float(at)) for at in range(40)]
    policy.victim(50.0)
    policy.target.version += 1
    for at in range(1 + slices):
        policy.victim(51.0 + at)
    left = policy._replanning._left
    assert len(left) == len(leaves) - 4 * (1 + slices)
    done = False
    while not done:
        before = len(left)
        done = policy.release(4)
        assert before - len(left) <= 4
    assert not left


def test_a_requests_own_target_replans_its_leaf_once_the_ttft_model_is_known():
    policy = make_policy("canopy-tlru")
    leaf = Leaf(0, 100)
    leaf.slo_ms, leaf.history = 50.0, 100
    policy.admit(leaf, 0.0)
    assert policy.victim(1.0) == (leaf, 0)
    policy.finish(Request(time=2.0, ttft_model=(0.001, 0.0)))
    assert policy.victim(3.0) == (leaf, 50)


def test_a_requests_own_target_follows_the_ttft_model():
    policy = make_policy("canopy-tlru")
    policy.finish(Request(time=0.0, ttft_model=(0.001, 0.0)))
    leaf = Leaf(0, 100)
    leaf.slo_ms, leaf.history = 50.0, 100
    policy.admit(leaf, 0.0)
    policy.finish(Request(time=2.0, ttft_model=(0.002, 0.0)))
    assert policy.victim(3.0) == (leaf, 75)


def talk(policy, time, turns):
    """One conversation whose prompt grows by 10 tokens a turn."""
    for turn in range(turns):
        path = [f"{time}-{i}" for i in range(10 * (turn + 1))]
        request = Request(time=time + turn, path=path, prompt_tokens=len(path))
        request.label = policy.arrive(request)
        request.label = policy.finish(request)


def test_growth_is_planned_for_before_the_first_fit():
    policy = make_policy("canopy-tlru", {"threshold_tokens": 5})
    talk(policy, 0.0, 6)
    assert policy.model.version == 0
    assert policy.next_tokens("default") == 10.0


def test_admitted_leaves_are_planned_again_after_the_first_fits():
    policy = make_policy("canopy-tlru", {"threshold_tokens": 5})
    leaf = Leaf(0, 100)
    leaf.history = 100
    policy.admit(leaf, 0.0)
    assert policy.victim(1.0) == (leaf, 95)
    talk(policy, 10.0, 30)
    assert policy.model.version >= 1
    assert policy.victim(100.0) == (leaf, 0)  # all of it is needed
