"""Tokens that requests keep from eviction are bounded, per tenant and in total, in both trees."""

import random
from array import array
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.policy.registry import live_names, make_policy
from sglang_canopy.records import CLIENT, GATEWAY, Leaf, Request
from sglang_canopy.telemetry.status import StatusCollector
from sglang_canopy.tenant import UNVOUCHED, Vouched, shown_tenant
from support.live_tree import LiveTree, check_tree, fake_req
from support.parity import PAGE_TOKENS, chained_path, fields_of, tokens_of, turns
from support.tree_recount import recount, recount_keeps


def conversation(number: int, token_count: int = 20) -> list[int]:
    return [1000 * number + i for i in range(token_count)]


def leaves_of(tree: LiveTree) -> list[Leaf]:
    nodes, root = tree.core._node_arena.values(), tree.core.root_node
    return [node.canopy for node in nodes if node is not root]


@pytest.fixture
def tree():
    return LiveTree(1000, "wa", {"quantum_tokens": 1})


def test_a_tenant_that_keeps_everything_gets_only_its_share(tree) -> None:
    for n in range(25):
        tree.serve(conversation(n), float(n), tenant="keeping", keep_until=3600.0)
    for n in range(25, 50):
        tree.serve(conversation(n), float(n), tenant="steady")
    tree.evict(500)
    assert sum(tree.match(conversation(n)) for n in range(25)) == 100
    assert sum(tree.match(conversation(n)) for n in range(25, 50)) == 400
    check_tree(tree)


@pytest.mark.parametrize("policy", live_names())
def test_wa_and_etlru_evict_kept_paths_last_and_other_policies_ignore_keeps(policy: str) -> None:
    tree = LiveTree(1000, policy, {"quantum_tokens": 1})
    tree.serve(conversation(0), 0.0, tenant="a", keep_until=3600.0)
    for n in range(1, 30):
        tree.serve(conversation(n), float(n))
    tree.evict(tree.cache.evictable_size() - 40)
    assert tree.match(conversation(0)) == (20 if policy in ("wa", "etlru") else 0)


def test_all_tenants_together_keep_the_total_and_no_more(tree) -> None:
    for n in range(40):
        tree.serve(conversation(n), float(n), tenant=f"t{n}", keep_until=3600.0)
    tree.evict(560)
    assert tree.core.protected.keeps.budget.used_tokens == 240  # 250 in whole nodes
    assert sum(tree.match(conversation(n)) == 20 for n in range(12)) == 12
    tree.evict(240)
    assert sum(tree.match(conversation(n)) for n in range(40)) == 0
    assert tree.core.protected.keeps.budget.used_tokens == 0


def test_a_client_with_many_names_leaves_a_vouched_tenant_its_share(tree) -> None:
    tree.serve(conversation(0), 0.0, tenant="steady", source=GATEWAY)
    for n in range(1, 40):
        tree.serve(conversation(n), float(n), tenant=f"x{n}", keep_until=3600.0)
    for n in range(40, 50):
        tree.serve(conversation(n), float(n), tenant="steady", source=GATEWAY, keep_until=3600.0)
    budget = tree.core.protected.keeps.budget
    assert budget.tokens_by_tenant == {Vouched("steady"): 100, UNVOUCHED: 100}
    check_tree(tree)


def test_waiting_requests_of_many_names_leave_a_vouched_tenant_its_share(tree) -> None:
    for n in range(50):
        tree.serve(conversation(n), float(n))
    queue_request(tree, conversation(0), 60.0, tenant="steady", source=GATEWAY)
    for n in range(1, 30):
        queue_request(tree, conversation(n), 60.0, tenant=f"x{n}")
    for n in range(30, 50):
        queue_request(tree, conversation(n), 60.0, tenant="steady", source=GATEWAY)
    charged_tokens = tree.core.protected.awaited.budget.tokens_by_tenant
    assert charged_tokens == {Vouched("steady"): 240, UNVOUCHED: 240}  # 250 in whole paths
    check_tree(tree)


def test_a_longer_keep_is_charged_to_its_own_tenant_and_within_its_share(tree) -> None:
    for n in range(10):
        tree.serve(conversation(n), 10.0 + n, tenant=f"v{n % 2}", source=GATEWAY, keep_until=60.0)
    for n in range(10):
        tree.serve(conversation(n), 20.0 + n, keep_until=3600.0)
    charged_tokens = tree.core.protected.keeps.budget.tokens_by_tenant
    assert charged_tokens == {Vouched("v0"): 40, Vouched("v1"): 60, UNVOUCHED: 100}
    assert tree.core.protected.keeps.refused_path_count == 5
    check_tree(tree)


@pytest.mark.parametrize("key", ["keep_tenant_share", "keep_total_share"])
def test_the_shares_are_settings_of_the_tree(key: str) -> None:
    tree = LiveTree(1000, "wa", {"keep_tenant_share": 0.5, "keep_total_share": 0.6, key: 0.02})
    for n in range(10):
        tree.serve(conversation(n), float(n), keep_until=3600.0)
    assert tree.core.protected.keeps.budget.used_tokens == 20


def test_a_kept_leaf_charges_the_path_above_it_once(tree) -> None:
    system = list(range(50))
    for n in range(5):
        tree.serve(system + conversation(n + 1, 10), float(n), tenant="a", keep_until=3600.0)
    assert tree.core.protected.keeps.budget.tokens_by_tenant == {"a": 100}
    tree.serve(system + conversation(9, 10), 9.0, tenant="a", keep_until=3600.0)
    assert tree.core.protected.keeps.budget.tokens_by_tenant == {"a": 100}


def test_a_request_without_a_keep_leaves_charges_below_it(tree) -> None:
    system = list(range(90))
    tree.serve([*system, 9001], 0.0, tenant="a", keep_until=3600.0)
    tree.serve([*system, 9002], 1.0, tenant="a")
    assert tree.core.protected.keeps.budget.tokens_by_tenant == {"a": 91}


def test_an_expired_keep_is_uncharged(tree) -> None:
    for n in range(5):
        tree.serve(conversation(n), 0.0, tenant="a", keep_until=10.0)
    assert tree.core.protected.keeps.budget.tokens_by_tenant == {"a": 100}
    tree.serve(conversation(7), 11.0, tenant="a", keep_until=100.0)
    assert tree.core.protected.keeps.budget.tokens_by_tenant == {"a": 20}


def queue_request(
    tree: LiveTree, tokens: list[int], time: float, salt: str | None = None, **fields: str
) -> Any:
    """Let a request wait in SGLang's queue, which looks its prompt up; ``fields``: of the policy's request."""
    req = fake_req(tokens, [], {"time": time}, cache_salt=salt)
    request = tree.core.requests.register(req)
    for name, value in fields.items():
        setattr(request, name, value)
    tree.cache.match_prefix(
        MatchPrefixParams(key=RadixKey(array("q", tokens), None, cache_salt=salt), req=req)
    )
    return req


def test_an_awaited_prefix_is_protected_without_a_keep(tree) -> None:
    tree.serve(conversation(1), 0.0)
    queue_request(tree, conversation(1), 1.0)
    (leaf,) = leaves_of(tree)
    assert (leaf.keep_until, leaf.awaited_until) == (None, 61.0)
    assert tree.core.protected.keeps.budget.used_tokens == 0


def test_a_waiting_requests_prefix_outlives_newer_prefixes(tree) -> None:
    for n in range(4):
        tree.serve(conversation(n), float(n))
    queue_request(tree, [*conversation(0), 7], 9.0)
    tree.evict(60)
    assert [tree.match(conversation(n)) for n in range(4)] == [20, 0, 0, 0]
    check_tree(tree)


def test_waiting_requests_of_one_tenant_protect_their_share_and_no_more(tree) -> None:
    for n in range(50):
        tree.serve(conversation(n), float(n))
    for n in range(40):
        queue_request(tree, conversation(n), 60.0)
    leaves = [leaf for leaf in leaves_of(tree) if (leaf.awaited_until or 0.0) > 60.0]
    assert len(leaves) == 12  # a quarter of the tier, in whole paths
    check_tree(tree)


def test_parts_of_an_awaited_path_stay_charged_after_splits_and_cuts() -> None:
    tree = LiveTree(1000, "canopy-lru", {"quantum_tokens": 1})
    for n in range(4):
        tree.serve(conversation(n, 240), float(n))
        queue_request(tree, conversation(n, 240), 10.0 + n)
        tree.match([*conversation(n, 235), 7])  # a prefix without the last tokens: splits the node
        check_tree(tree)
    leaves = [leaf for leaf in leaves_of(tree) if leaf.awaited_until is not None]
    used_tokens = tree.core.protected.awaited.budget.used_tokens
    assert sum(leaf.length for leaf in leaves) == used_tokens == 240
    tree.evict(900)  # evicts tails of protected paths
    check_tree(tree)
    tree.core.protected.protect_queue([])  # the clients have disconnected
    assert tree.core.protected.awaited.budget.used_tokens == 0
    assert not [leaf for leaf in leaves_of(tree) if leaf.awaited_until is not None]


def test_each_part_of_a_path_on_two_tiers_is_charged_while_it_is_protected() -> None:
    tree = LiveTree(1000, "canopy-lru", {"quantum_tokens": 1}, host_tokens=1000)
    tree.serve(conversation(1, 60), 0.0)
    tree.evict(20)
    tree.settle()
    queue_request(tree, conversation(1, 60), 10.0)
    check_tree(tree)
    parent, child = sorted(leaves_of(tree), key=lambda leaf: leaf.offset)
    assert parent.awaited_until == child.awaited_until == 70.0
    assert tree.core.protected.awaited.budget.used_tokens == 60
    tree.core.protected.drop_leaf(child)
    assert tree.core.protected.awaited.budget.used_tokens == 40


def test_a_node_from_storage_inherits_no_granted_keep(tree) -> None:
    tree.serve(conversation(1, 20), 0.0, keep_until=3600.0)
    tree.serve(conversation(1, 40), 1.0)
    child = next(node for node in tree.core._node_arena.values() if node.canopy.offset == 20)
    tree.core.readmit(child)
    child.canopy.hits = 0  # as SGLang makes it for pages without metadata
    tree.request(2.0)
    assert child.canopy.hits == 1
    assert child.canopy.keep_until is None
    check_tree(tree)


def workload_with_keeps(seed: int, requests: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    steps = []
    for now, conversation_number, blocks in turns(rng, requests):
        keep_until = now + rng.choice([2.0, 20.0, 200.0]) if rng.random() < 0.5 else None
        steps.append(
            {
                "time": now,
                "blocks": blocks,
                "category": ("chat", "agent")[conversation_number % 2],
                "conversation": f"c{conversation_number}",
                "tenant": ("a", "b", None)[conversation_number % 3],
                "source": GATEWAY if conversation_number % 3 else CLIENT,
                "keep_until": keep_until,
            }
        )
    return steps


def test_simulator_and_live_cache_grant_and_evict_the_same() -> None:
    granted_path_count = refused_path_count = 0
    shares = {"keep_tenant_share": 0.5, "keep_total_share": 0.6}
    for seed in range(4):
        live = LiveTree(
            40 * PAGE_TOKENS,
            "wa",
            {"quantum_tokens": 1, "block_tokens": PAGE_TOKENS, **shares},
            page_size=PAGE_TOKENS,
        )
        simulated = RadixTree(make_policy("wa"), 40, PAGE_TOKENS, **shares)
        for step in workload_with_keeps(seed, 120):
            path, labels = chained_path(step), fields_of(step)
            hit_blocks = simulated.access(
                Request(
                    time=step["time"],
                    path=path,
                    block_tokens=PAGE_TOKENS,
                    prompt_tokens=len(path) * PAGE_TOKENS,
                    **labels,
                )
            )
            stamp = {"path": path, "block_tokens": PAGE_TOKENS, **labels}
            live_hit_tokens = live.serve(tokens_of(step, PAGE_TOKENS), step["time"], **stamp)
            assert live_hit_tokens == hit_blocks * PAGE_TOKENS
            budget = live.core.protected.keeps.budget
            assert budget.tokens_by_tenant == simulated.keeps.budget.tokens_by_tenant
            recount(simulated)
            check_tree(live)
            nodes = live.core._node_arena.values()
            recount_keeps(live.core.protected.keeps, (node.canopy for node in nodes))
        granted_path_count += simulated.keeps.granted_path_count
        refused_path_count += simulated.keeps.refused_path_count
    assert granted_path_count > 50
    assert refused_path_count > 50


def test_the_status_shows_kept_tokens_by_tenant() -> None:
    tree = LiveTree(1000, "wa")
    tree.serve(conversation(1), 0.0, tenant="a", keep_until=3600.0)
    tree.serve(conversation(2), 1.0, keep_until=3600.0)
    for n in range(3, 10):
        tree.serve(conversation(n), float(n), tenant="a", keep_until=3600.0)
    keep_status = StatusCollector(tree.cache, 0).collect(0.0)["keep"]
    tenants = [{"tenant": shown_tenant("a"), "tokens": 100}, {"tenant": None, "tokens": 20}]
    assert keep_status["tenants"] == tenants
    assert (keep_status["tenant_limit_tokens"], keep_status["total_limit_tokens"]) == (100, 250)
    assert (keep_status["granted"], keep_status["refused"]) == (6, 3)
