"""The host tier: demoted nodes, the policy that ranks them, and expired nodes."""

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_canopy.config.tiers import PolicyChoice, TierOptions
from sglang_canopy.radix.counters import DEVICE, HOST, TRIM, TTL
from sglang_canopy.ttl.table import RESIDUAL, Group, TTLTable
from support.live_tree import LiveTree, check_tree

ONE_TOKEN = {"quantum_tokens": 1}
EACH_WRITE_POLICY = pytest.mark.parametrize("write_policy", ["write_through", "write_back"])


def prompt(number: int, token_count: int) -> list[int]:
    """Return the first ``token_count`` tokens of the prompt with this number."""
    return [number * 1000 + i for i in range(token_count)]


def leaf_of(tree: LiveTree, first_token: int):
    """Return the leaf of the node that begins with ``first_token``."""
    nodes = [node for node in tree.core._node_arena.values() if node.key]
    return next(node.canopy for node in nodes if node.key.raw_token_ids()[0] == first_token)


@EACH_WRITE_POLICY
def test_an_allocation_evicts_no_more_than_it_lacks(write_policy: str) -> None:
    tree = LiveTree(16, config=ONE_TOKEN, host_tokens=64, write_policy=write_policy)
    tree.serve(prompt(1, 10), time=1)
    tree.serve(prompt(2, 4), time=2)
    tree.cache.evict_for_alloc(EvictParams(num_tokens=5 - tree.allocator.available_size()))
    assert tree.allocator.available_size() == 5
    assert tree.match(prompt(1, 10)) == 7
    assert tree.match(prompt(2, 4)) == 4
    check_tree(tree)


@EACH_WRITE_POLICY
def test_tails_trimmed_by_t_lru_are_demoted(write_policy: str) -> None:
    config = {**ONE_TOKEN, "threshold_tokens": 60}
    options = {"write_policy": write_policy, "page_size": 4}
    tree = LiveTree(256, "canopy-tlru", config, host_tokens=512, **options)
    model = tree.core.live.device_policy.model  # type: ignore[attr-defined]
    tree.serve(prompt(9, 40), time=0)
    tree.serve(prompt(9, 80), time=1)  # a turn adds 40 tokens
    model.fit(1.0)
    tree.serve(prompt(1, 100), time=2)
    tree.serve(prompt(2, 60), time=3)
    unevictable_tokens = 256 - tree.cache.evictable_size()
    tree.evict(unevictable_tokens + 60)
    tree.settle()
    assert 0 < tree.match(prompt(1, 100)) < 100
    tree.load_back(prompt(1, 100))
    assert tree.match(prompt(1, 100)) == 100
    assert tree.core.live.counters.category_counts("default").tiers[DEVICE].evicted_tokens[TRIM] > 0
    check_tree(tree)


def test_the_host_evicts_by_its_own_policy() -> None:
    """The device evicts the least recently used, the host the least frequently used."""
    tiers = TierOptions(host=PolicyChoice("lfu"))
    tree = LiveTree(8, config=ONE_TOKEN, host_tokens=16, tiers=tiers)
    frequent, rare = prompt(1, 8), prompt(2, 8)
    for time in (1, 2, 3):
        tree.serve(frequent, time=time)
    tree.serve(rare, time=4)
    tree.serve(prompt(3, 8), time=5)  # the host holds two of the three
    tree.serve(prompt(4, 8), time=6)
    assert tree.load_back(frequent) == 8
    assert tree.load_back(rare) == 0
    assert type(tree.core.live.host_policy).name == "lfu"
    check_tree(tree)


@pytest.mark.parametrize(("ttl_s", "evicted_tokens", "older_tokens"), [(3.0, 8, 8), (300, 0, None)])
def test_an_expired_host_copy_is_evicted_before_older_ones(ttl_s, evicted_tokens, older_tokens):
    tiers = TierOptions(host_ttl=TTLTable(categories={"short": ttl_s}))
    tree = LiveTree(8, config=ONE_TOKEN, host_tokens=23, tiers=tiers)
    tree.serve(prompt(1, 8), time=1, category="long")
    tree.serve(prompt(2, 8), time=2, category="short")
    tree.serve(prompt(3, 8), time=9, category="long")
    tree.serve(prompt(4, 8), time=10, category="long")
    assert tree.load_back(prompt(2, 8)) == 8 - evicted_tokens
    counts = tree.core.live.counters.category_counts("short").tiers[HOST]
    assert counts.evicted_tokens[TTL] == evicted_tokens
    assert older_tokens is None or tree.load_back(prompt(1, 8)) == older_tokens
    check_tree(tree)


def test_a_requests_own_ttl_overrides_the_table() -> None:
    tiers = TierOptions(host_ttl=TTLTable(residual_ttl_s=3.0))
    tree = LiveTree(8, config=ONE_TOKEN, host_tokens=23, tiers=tiers)
    for number, ttl_s in ((1, 500.0), (2, None)):
        request = tree.request(float(number), prompt_tokens=8)
        request.ttl_s = ttl_s
        tree.core.requests.finish(request)
        tree.insert(prompt(number, 8), request)
    tree.serve(prompt(3, 8), time=9)
    tree.serve(prompt(4, 8), time=10)
    assert tree.load_back(prompt(2, 8)) == 0
    assert tree.load_back(prompt(1, 8)) == 8
    check_tree(tree)


def test_a_shared_prefix_takes_the_longest_ttl_and_the_groups_if_one_has_none() -> None:
    tree = LiveTree(64)

    def insert(ttl_s: float | None, conversation: str, time: float):
        request = tree.request(time, prompt_tokens=4, conversation=conversation)
        request.ttl_s = ttl_s
        tree.insert([1, 2, 3, 4], request)
        return leaf_of(tree, 1).ttl_s

    assert insert(50.0, "a", 1) == 50.0
    assert insert(20.0, "a", 2) == 20.0  # its own conversation may shorten it
    assert insert(10.0, "b", 3) == 20.0
    assert insert(None, "c", 4) is None
    assert insert(99.0, "b", 5) is None


def test_each_node_is_in_the_group_of_the_deepest_root_on_its_path() -> None:
    table = TTLTable((Group(101, 60.0), Group(103, 30.0)), block_tokens=4)
    tree = LiveTree(64, tiers=TierOptions(ttl=table, host_ttl=table))
    path = [100, 101, 102, 103]
    path_tokens = (4, 8, 12, 16)
    for time, token_count in enumerate(path_tokens):  # one node a block
        request = tree.request(float(time), path=path[: token_count // 4], block_tokens=4)
        tree.insert(prompt(1, token_count), request)
    groups = [leaf_of(tree, 1000 + token_count - 4).group for token_count in path_tokens]
    assert groups == [RESIDUAL, 0, 0, 1]
    assert leaf_of(tree, 1012).host_group == 1


def test_a_node_from_storage_takes_its_parents_attributes() -> None:
    tree = LiveTree(32, "wa", ONE_TOKEN, host_tokens=64)
    tree.serve([1, 2, 3, 4], time=1, category="chat", conversation="c", turn=2)
    node = next(node for node in tree.core._node_arena.values() if node.parent is not None)
    slots = tree.cache.cache_controller.mem_pool_host.alloc(4)
    tree.core.insert_host(node.id, tree.key([5, 6, 7, 8]), slots, ["hash"] * 4)
    tree.request(9.0)  # the next arrival updates the policies
    loaded = next(child.canopy for child in node.children.values())
    assert (loaded.offset, loaded.length, loaded.hits) == (4, 4, 1)
    assert (loaded.category, loaded.turn) == (node.canopy.category, 2)
    assert loaded in list(tree.core.live.host_policy.leaves())
    check_tree(tree)
