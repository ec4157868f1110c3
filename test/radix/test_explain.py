"""The explanation of a conversation matches the tree and the log about it."""

import json
import random

import pytest

from sglang_canopy.policy.registry import live_names
from sglang_canopy.radix.explain import LOOKED_AHEAD_LEAVES, explain, parse_question
from sglang_canopy.radix.traffic import MAX_EVICTIONS, EvictionLog, TierEviction
from sglang_canopy.reuse.survival import continuation_probability
from support.live_tree import LiveTree, check_tree


def explain_conversation(tree, conversation, **body):
    return explain(tree.core, {"conversation": conversation, **body})


def test_the_tokens_and_tiers_of_a_conversation_are_explained():
    tree = LiveTree(64, "wa", {"quantum_tokens": 1}, host_tokens=128)
    tree.serve(list(range(10)), 1.0, conversation="a", category="chat")
    tree.serve(list(range(16)), 5.0, conversation="a", category="chat")
    tree.request(20.0)
    (explanation,) = explain_conversation(tree, "a", tenant=None)
    assert explanation["cached"]
    assert explanation["tokens"]["device"] == 16
    assert explanation["last_use_ago_s"] == 15.0
    assert [(row["offset"], row["tokens"]) for row in explanation["nodes"]] == [(0, 10), (10, 6)]
    assert explanation["belief"]["category"].startswith("chat")
    assert explanation["next_to_go"]["tokens_before"] == 0
    assert explanation["next_to_go"]["free_tokens"] == 48
    assert explanation["evicted"] == []


def test_the_use_of_a_shared_beginning_by_others_is_not_the_conversations_use():
    tree = LiveTree(96, "wa", {"quantum_tokens": 1})
    system = list(range(1000, 1016))
    tree.serve([*system, *range(8)], 1.0, conversation="a")
    tree.serve([*system, *range(100, 108)], 5.0, conversation="b")
    tree.serve([*system, *range(200, 208)], 9.0, conversation="c")
    tree.request(20.0)
    (explanation,) = explain_conversation(tree, "a", tenant=None)
    assert explanation["last_use_ago_s"] == 19.0
    assert [node["last_use_ago_s"] for node in explanation["nodes"]] == [11.0, 19.0]


def test_the_cause_of_an_eviction_is_remembered():
    tree = LiveTree(32, "canopy-lru", {"quantum_tokens": 1})
    tree.serve(list(range(16)), 1.0, conversation="a", category="chat")
    tree.serve(list(range(100, 124)), 4.0, conversation="b")
    (explanation,) = explain_conversation(tree, "a", tenant=None)
    assert explanation["tokens"]["device"] == 8
    (eviction,) = explanation["evicted"]
    assert eviction == {
        "evicted_ago_s": 0.0,
        "tier": "device",
        "tokens": 8,
        "offset": 8,
        "reason": "capacity",
        "by": "lru",
        "category": "chat",
        "idle_s": 3.0,
        "demoted": False,
    }
    tree.serve(list(range(200, 232)), 9.0, conversation="c")
    (explanation,) = explain_conversation(tree, "a", tenant=None)
    assert not explanation["cached"]
    assert explanation["next_to_go"] is None
    assert len(explanation["evicted"]) == 2


@pytest.mark.parametrize("policy", live_names())
@pytest.mark.parametrize("seed", [1, 2])
def test_a_question_changes_no_eviction(seed, policy):
    rng = random.Random(seed)
    trees = [LiveTree(64, policy, {"quantum_tokens": 1}, host_tokens=64) for _ in range(2)]
    for step in range(60):
        name = rng.randrange(5)
        tokens = [100 * name + i for i in range(rng.randint(1, 30))]
        for tree in trees:
            tree.serve(tokens, float(step), conversation=str(name))
        if step % 7 == 0:
            (explanation,) = explain_conversation(trees[0], str(name), tenant=None)
            on_device = [row for row in explanation["nodes"] if "device" in row["tiers"]]
            assert explanation["tokens"]["device"] == sum(row["tokens"] for row in on_device) > 0
            json.dumps(explanation)
            check_tree(trees[0])
    digests = [tree.core.live.counters.victim_digest.count_and_digest for tree in trees]
    assert digests[0] == digests[1]


def eviction(**fields):
    labels = {"time_s": 0.0, "tier": 0, "tenant": None, "conversation": "a", "category": "chat"}
    defaults = {"offset": 0, "tokens": 10, "reason_index": 0, "policy": "wa", "idle_s": 1.0}
    return TierEviction(**{**labels, **defaults, "is_demoted": False, **fields})


def test_evictions_are_bounded_and_the_newest_come_first():
    log = EvictionLog()
    for number in range(MAX_EVICTIONS + 10):
        log.append(eviction(time_s=float(number), tokens=number))
    assert len(log) == MAX_EVICTIONS
    latest = log.latest_evictions(None, "a", max_evictions=2)
    assert [logged.tokens for logged in latest] == [MAX_EVICTIONS + 9, MAX_EVICTIONS + 8]
    assert log.latest_evictions("other tenant", "a") == []


def test_the_rate_is_of_recent_evictions():
    log = EvictionLog()
    assert log.tokens_per_s(0, 1000.0) == 0.0
    log.append(eviction(time_s=100.0, tokens=10**6))
    log.append(eviction(time_s=900.0, tokens=300))
    log.append(eviction(time_s=950.0, tokens=300))
    log.append(eviction(time_s=960.0, tokens=999, tier=1))
    assert log.tokens_per_s(0, 1000.0) == 6.0


def test_continuation_probability_follows_the_survival_curve():
    assert continuation_probability([1.0, 0.5, 0.25], 0.0) == 0.75
    assert continuation_probability([], 5.0) == 0.0
    assert continuation_probability([1.0, 0.0], 1e9) == 0.0


@pytest.mark.parametrize("question", ["[", "{}", '{"answer": "../x", "conversation": "a"}', "[1]"])
def test_a_malformed_question_is_ignored(question):
    assert parse_question(question) is None


def test_a_bounded_number_of_leaves_is_examined(monkeypatch):
    """The bound holds for all tenants together, since one thread answers every question."""
    tree = LiveTree(2000, "wa", {"quantum_tokens": 1})
    for number in range(600):
        tree.serve([1000 * number, 1000 * number + 1], float(number), conversation=f"c{number}")
    for tenant in ("a", "b", "c"):
        tree.serve([7, 8, 9], 600.0, conversation="last", tenant=tenant)
    policy, times = tree.core.live.device_policy, []
    original_victim = policy.victim
    monkeypatch.setattr(policy, "victim", lambda now: times.append(now) or original_victim(now))
    explanation = explain_conversation(tree, "last")
    assert len(explanation) == 3
    assert len(times) == LOOKED_AHEAD_LEAVES
    assert explanation[0]["next_to_go"]["looked_at_tokens"] == 2 * LOOKED_AHEAD_LEAVES
    check_tree(tree)


def samples_of_one_prompt(policy):
    """Return a tree with twelve answers to one prompt: leaves of equal time and depth, as with n = 12."""
    tree = LiveTree(2000, policy, {"quantum_tokens": 1})
    prompt = list(range(100, 140))
    path = [hash(tuple(prompt[:end])) for end in range(1, 41)]
    for number in range(12):
        request = tree.request(
            1.0, conversation="c", block_tokens=1, prompt_tokens=40, path=list(path)
        )
        tree.insert([*prompt, *range(1000 + 100 * number, 1010 + 100 * number)], request)
    return tree


def evict_all(tree):
    """Evict the device; return the first tokens of the nodes, in order."""
    first_tokens = []
    while tree.core.evictable_device_leaves:
        node, _ = tree.core.evictable_device_leaves.next_victim(tree.core.clock.now)
        first_tokens.append(node.key.token_ids[0])
        tree.evict(len(node.key))
    return first_tokens


@pytest.mark.parametrize("leaves", [1, 5, LOOKED_AHEAD_LEAVES])
@pytest.mark.parametrize("policy", live_names())
def test_tied_leaves_are_evicted_in_the_same_order_after_a_question(policy, leaves, monkeypatch):
    """Ranks that look ahead differently must evict the same."""
    explained_tree, untouched_tree = samples_of_one_prompt(policy), samples_of_one_prompt(policy)
    monkeypatch.setattr("sglang_canopy.radix.explain.LOOKED_AHEAD_LEAVES", leaves)
    explain_conversation(explained_tree, "c", tenant=None)
    assert evict_all(explained_tree) == evict_all(untouched_tree)


def test_a_look_ahead_reads_a_bounded_number_of_children(monkeypatch):
    """One system prompt can have 50,000 continuations."""
    monkeypatch.setattr("sglang_canopy.radix.evictable.MAX_CHILDREN_READ", 20)
    tree = LiveTree(600, "canopy-lru", {"quantum_tokens": 1})
    for number in range(100):
        tree.serve([1, 1000 + number], float(number), conversation=f"c{number}")
    (explanation,) = explain_conversation(tree, "c99", tenant=None)
    assert explanation["next_to_go"]["tokens_before"] == 99
    check_tree(tree)
