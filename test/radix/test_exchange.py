"""Exchange policies on a tree in use: no node is lost, and the new policy ranks all of them."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_canopy.config.policy_change import PolicyChange, change_of, unpacked
from sglang_canopy.config.tiers import PolicyChoice
from sglang_canopy.errors import CanopyError
from sglang_canopy.radix.exchange import MAX_CHANGES
from sglang_canopy.whatif.meter import Memory, Meter, MeterSetup
from support.live_tree import LiveTree, check

POLICIES = ("canopy-lru", "wa", "threshold-lru", "canopy-tlru", "etlru")


def to(name, host=None, **config):
    return PolicyChange(PolicyChoice(name, config), None if host is None else PolicyChoice(host))


def prompts(seed, count, tenants=1):
    """Growing conversations and their tenants."""
    draw, talks = random.Random(seed), {}
    for step in range(count):
        who = draw.randrange(8)
        talk = talks.setdefault(who, [1000 + who % tenants])
        if len(talk) > 40:
            talk[1:] = []
        talk.extend(draw.randrange(100) + 100 * who for _ in range(draw.randint(2, 8)))
        yield list(talk), float(step), f"t{who % tenants}"


def chained(tokens):
    """Ids of blocks of one token that name the path to them."""
    return {"path": [hash(tuple(tokens[: n + 1])) for n in range(len(tokens))], "block_tokens": 1}


def nodes(tree):
    """Return every node's path end, tokens and tiers."""
    found = []
    for node in tree.core._node_arena.values():
        if node is not tree.core.root_node:
            data = node.component_data[0]
            value = data.value is not None, data.host_value is not None
            found.append((node.canopy.offset, tuple(node.key.token_ids), *value))
    return sorted(found)


def evicted_order(tree):
    """Return the ends of paths in the order of eviction from the device, one or more tokens at a time."""
    order = []
    while tree.allocator.available_size() < tree.allocator.size:
        choice = tree.core.evictable_device_leaves.next_victim(tree.core.clock.now)
        assert choice is not None
        order.append((choice[0].canopy.offset, choice[0].key.token_ids[-1]))
        tree.evict(1)
    return order


@settings(max_examples=settings.default.max_examples // 2)
@given(
    st.integers(0, 10_000),
    st.lists(st.tuples(st.sampled_from(POLICIES), st.sampled_from((None, *POLICIES))), max_size=4),
    st.sampled_from((0, 160)),
)
def test_every_leaf_is_ranked_by_the_new_policy_and_none_is_lost(seed, changes, host_tokens):
    tree = LiveTree(96, "wa", {"quantum_tokens": 1}, host_tokens=host_tokens)
    asked = iter(prompts(seed, 120))
    for name, host in changes:
        for tokens, time, _ in (next(asked) for _ in range(20)):
            tree.serve(tokens, time)
        before = nodes(tree)
        tree.core.exchange.apply(to(name, host if host_tokens else None), "test")
        assert nodes(tree) == before
        assert tree.core.live.device_policy is tree.core.evictable_device_leaves.policy
        assert tree.core.live.host_policy is tree.core.evictable_host_leaves.policy
        check(tree)
        tree.core.evictable_device_leaves.admit_pending()
        tree.core.evictable_host_leaves.admit_pending()
        check(tree)
        assert set(tree.core.live.device_policy.leaves()) == {
            node.canopy for node in tree.core.evictable_device_leaves
        }
    for tokens, time, _ in (next(asked) for _ in range(20)):
        tree.serve(tokens, time)
        assert tree.kv(tokens) == tokens
        check(tree)


@settings(max_examples=settings.default.max_examples // 3)
@given(st.integers(0, 10_000), st.sampled_from(POLICIES))
def test_after_a_return_to_lru_the_order_is_that_of_a_tree_that_always_had_it(seed, policy):
    """No eviction, so both trees hold the same nodes."""
    trees = [LiveTree(1024, name, {"quantum_tokens": 1}) for name in (policy, "canopy-lru")]
    for tokens, time, _ in prompts(seed, 40):
        for tree in trees:
            tree.serve(tokens, time)
    trees[0].core.exchange.apply(to("canopy-lru"), "test")
    assert evicted_order(trees[0]) == evicted_order(trees[1])


def test_the_learnt_state_of_wa_is_restored_after_an_exchange():
    tree = LiveTree(96, "wa")
    for tokens, time, _ in prompts(1, 200):
        tree.serve(tokens, time, **chained(tokens))
    learnt = tree.core.live.device_policy.state()
    assert learnt
    tree.core.exchange.apply(to("canopy-lru"), "test")
    tree.core.exchange.apply(to("wa"), "test")
    assert tree.core.live.device_policy.state() == learnt


@pytest.mark.parametrize("host_tokens", [0, 160])
@pytest.mark.parametrize("policy", ["wa", "etlru", "canopy-tlru"])
def test_while_lru_ranks_the_previous_policy_keeps_learning_and_labelling(
    policy, host_tokens
) -> None:
    """Otherwise half of the leaves have no label when it returns, and every turn is a first turn."""
    trees = [LiveTree(96, policy, host_tokens=host_tokens) for _ in range(2)]
    asked = list(prompts(1, 200))
    for number, (tokens, time, _) in enumerate(asked):
        for tree in trees:
            tree.serve(tokens, time, **chained(tokens))
        if number % 40 == 20:
            trees[0].core.exchange.apply(to("canopy-lru"), "test")
            assert not trees[0].core.live.device_policy.learns
        if number % 40 == 39:
            trees[0].core.exchange.apply(to(policy), "test")
            assert trees[0].core.live.host_policy.model is trees[0].core.live.device_policy.model
    away, stayed = (tree.core.live.device_policy for tree in trees)
    assert away.learns
    assert away.state() == stayed.state()
    assert labels(trees[0], time) == labels(trees[1], time)


def test_a_tree_that_began_with_lru_is_labelled_from_its_first_policy_on() -> None:
    tree = LiveTree(96, "canopy-lru")
    for number, (tokens, time, _) in enumerate(prompts(1, 60)):
        if number in (20, 40):
            tree.core.exchange.apply(to("wa" if number == 20 else "canopy-lru"), "test")
        tree.serve(tokens, time, **chained(tokens))
    assert tree.core.live.running == "canopy-lru"
    assert labels(tree, time) != {"default"}


def labels(tree, time):
    """Return the labels of the nodes that the request at ``time`` used."""
    used = (node.canopy for node in tree.core._node_arena.values())
    return {leaf.category for leaf in used if leaf.last_access == time}


def taught() -> LiveTree:
    """A tree whose device policy has learnt from 120 returns."""
    tree = LiveTree(4000, "wa", host_tokens=8000)
    for turn in range(3):
        for who in range(60):
            tokens = list(range(1000 * who, 1000 * who + 10 * (turn + 1)))
            request = tree.request(
                float(60 * turn + who),
                conversation=f"c{who}",
                prompt_tokens=len(tokens),
                **chained(tokens),
            )
            tree.core.requests.finish(request)
    assert tree.core.live.device_policy.model.samples == 120
    return tree


def test_the_hosts_policy_keeps_the_devices_learnt_state():
    tree = taught()
    learnt = tree.core.live.device_policy.state()
    tree.core.exchange.apply(to("canopy-lru", "wa"), "test")
    (learner,) = tree.core.live.learners
    assert tree.core.live.host_policy is learner
    assert learner.state() == learnt
    tree.core.exchange.apply(to("wa"), "test")
    assert tree.core.live.device_policy.state() == learnt
    assert tree.core.live.device_policy.model.samples == 120


def test_the_host_policys_learnt_state_is_restored_after_an_exchange():
    tree = taught()
    change = PolicyChange(PolicyChoice("canopy-lru"), PolicyChoice("wa", {"min_samples": 7}))
    tree.core.exchange.apply(change, "test")
    for other in ("etlru", None):
        events = tree.core.live.host_policy.model.categories.root.all_events
        assert sum(events) >= 100
        if other is not None:
            tree.core.exchange.apply(to(other, threshold_tokens=8), "test")
            tree.core.exchange.apply(change, "test")


def test_state_learnt_with_other_categories_is_not_read():
    tree = LiveTree(96, "wa", {"categories": "type-turn"})
    for tokens, time, _ in prompts(1, 200):
        tree.serve(tokens, time, **chained(tokens))
    tree.core.exchange.apply(to("wa"), "test")
    assert len(tree.core.live.device_policy.model.categories) == 2


def test_wa_starts_from_the_meters_learnt_state():
    tree = LiveTree(96, "canopy-lru")
    live = tree.core.live
    live.meter = Meter(MeterSetup(), Memory(96), "canopy-lru")
    for tokens, time, _ in prompts(1, 200):
        request = tree.request(time, prompt_tokens=len(tokens), **chained(tokens))
        tree.core.requests.finish(request)
        live.meter.ended(request, tree.match(tokens))
        tree.insert(tokens, request)
    tree.core.exchange.apply(to("wa"), "test")
    assert sum(live.device_policy.model.categories.root.all_events) > 0
    assert live.meter.running == "wa"


def test_the_meter_prices_by_the_measured_depth_scale():
    live = LiveTree(64, "canopy-lru").core.live
    live.meter = Meter(MeterSetup(), Memory(64), "canopy-lru")
    live.measured(5_000.0)
    assert live.meter.stats()["depth_scale_tokens"] == 5_000
    live.measured(6_000.0)  # too small a change
    assert live.meter.stats()["depth_scale_tokens"] == 5_000
    live.measured(10_000.0)
    assert live.meter.stats()["depth_scale_tokens"] == 10_000


def test_the_last_changes_are_remembered():
    tree = LiveTree(96, "wa")
    for number in range(MAX_CHANGES + 5):
        tree.core.exchange.apply(to("wa" if number % 2 else "canopy-lru"), f"number {number}")
    changes = tree.core.exchange.changes
    assert len(changes) == MAX_CHANGES
    last = changes[-1]
    assert (last.before, last.after, last.why) == ("wa", "canopy-lru", "number 20")


# ---- the floor: back to LRU ----


class Behind(Meter):
    """A meter that reports the policy behind LRU until a test changes that."""

    keeper = "canopy-lru"


@pytest.mark.parametrize(
    ("policy", "config", "keeps", "then"),
    [
        ("wa", {}, True, "canopy-lru"),
        ("wa", {}, False, "wa"),
        ("etlru", {"threshold_tokens": 64}, True, "etlru"),
    ],
)
def test_lru_ranks_if_a_policy_for_hits_is_behind(policy, config, keeps, then):
    tree = LiveTree(96, policy, config)
    live = tree.core.live
    live.meter, live.keeps_floor = Behind(MeterSetup(), Memory(96), policy), keeps
    tree.request(3600.0)
    assert live.running == then
    if then != policy:
        assert "behind canopy-lru" in tree.core.exchange.changes[-1].why


def test_the_policy_is_restored_as_requested():
    tree = LiveTree(96, "canopy-lru")
    live = tree.core.live
    live.meter = Behind(MeterSetup(), Memory(96), "canopy-lru")
    tree.core.exchange.apply(to("wa", host="etlru", min_samples=7), "test")
    tree.request(3600.0)
    assert (live.running, live.tiers.host) == ("canopy-lru", None)
    live.meter.keeper = "wa"
    tree.request(3601.0)
    assert (live.running, live.device_policy.config.min_samples) == ("wa", 7)
    assert live.tiers.host == PolicyChoice("etlru")
    assert "ahead of canopy-lru again" in tree.core.exchange.changes[-1].why


# ---- allowed requests ----


def test_a_change_survives_its_message():
    change = change_of({"device": "wa", "device_config": {"model": "recency"}})
    assert unpacked(change.message()) == change
    change = change_of({"device": "canopy-lru", "host": "wa"})
    assert unpacked(change.message()) == change
    assert unpacked("[") is None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([], "JSON object"),
        ({"device": "lru"}, "must be one of"),
        ({"device": "wa", "devise": 1}, "unknown key 'devise'"),
        ({"device": "wa", "device_config": {"block_tokens": 16}}, "cannot change while"),
        ({"device": "wa", "device_config": {"profile": "/etc/passwd"}}, "cannot change while"),
        ({"device": "wa", "device_config": {"model": "magic"}}, "must be one of"),
        ({"device": "wa", "host_config": {}}, "host_config needs host"),
        ({"device": "wa", "canary": 0.5}, "unknown key 'canary'"),
    ],
)
def test_impossible_exchanges_are_refused_with_the_reason(body, said):
    with pytest.raises(CanopyError, match=said):
        change_of(body)
