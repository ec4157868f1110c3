"""A tenant's requests displace neither the prompts nor the samples of others, and no arrival costs much more."""

import random
from collections import Counter

from sglang_canopy.records import Request
from sglang_canopy.reuse.learner import MAX_JUNCTIONS, ReuseModel
from sglang_canopy.reuse.tenant_window import MAX_TENANTS

TRUNK_BLOCKS = 400
MAX_BLOCKS = 1_000


def serve(
    model: ReuseModel, now: float, path: list[int], tenant: str | None, category: str = "chat"
) -> int:
    """Serve a request; return the number of samples that it added."""
    samples_before = model.reuse_count + len(model.shadow)
    request = Request(now, category, path, 64, 64 * len(path), tenant=tenant)
    model.arrive(request)
    request.output_tokens, request.stop = 64, "end"
    model.finish(request)
    return model.reuse_count + len(model.shadow) - samples_before


def serve_conversations(model: ReuseModel, conversation_count: int) -> float:
    """Serve three turns of each conversation; return the time of the last."""
    now = 0.0
    for conversation in range(conversation_count):
        path = [10**9 + 100 * conversation + i for i in range(12)]
        for turn in (4, 8, 12):
            now += 0.1
            serve(model, now, path[:turn], "regular", "support")
    return now


def tips_by_tenant(model: ReuseModel) -> Counter[str | None]:
    return Counter(tip.tenant for tip in model.shadow)


def test_a_prompt_with_many_branches_is_few_samples_a_request() -> None:
    model = ReuseModel(uses_added_tokens=True)
    now, max_samples = serve_conversations(model, 500), 0
    trunk = list(range(1, TRUNK_BLOCKS + 1))
    serve(model, now, trunk, "other")
    # Branch off the long prompt ever closer to its start, then ever further from it.
    for depth in (*range(TRUNK_BLOCKS - 1, TRUNK_BLOCKS // 2, -1), *range(1, TRUNK_BLOCKS // 2)):
        now += 0.01
        serve(model, now, [*trunk[:depth], 10**7 + depth], "other")
    for number in range(100):
        now += 0.01
        max_samples = max(max_samples, serve(model, now, [*trunk, 2 * 10**7 + number], "other"))
    assert max_samples <= 2 * (MAX_JUNCTIONS + 1)
    assert tips_by_tenant(model)["regular"] == 1500
    assert len(model.shadow.find_junctions(trunk)) == MAX_JUNCTIONS


def test_dropped_junctions_do_not_count_as_prefixes_without_reuse() -> None:
    model = ReuseModel()
    trunk, now = list(range(1, TRUNK_BLOCKS + 1)), 1.0
    serve(model, now, trunk, None)
    for depth in range(TRUNK_BLOCKS - 1, 0, -1):
        now += 0.01
        serve(model, now, [*trunk[:depth], 10**7 + depth], None)
    for number in range(50):
        now += 0.01
        serve(model, now, [*trunk, 2 * 10**7 + number], None)
    model.fit(now)
    shared_prefix = next(each for each in model.categories if each.label == "shared prefix")
    assert sum(shared_prefix.all_waiting) <= 2 * MAX_JUNCTIONS
    assert sum(shared_prefix.all_events) >= 40 * MAX_JUNCTIONS


def test_the_tenant_with_most_samples_loses_its_oldest_in_a_full_window() -> None:
    model = ReuseModel(max_samples=2000)
    now = serve_conversations(model, 300)
    for number in range(5000):
        now += 0.01
        serve(model, now, [10**7 + number], "other")
    assert tips_by_tenant(model) == {"regular": 900, "other": 1100}
    assert len(model.shadow) == 2000
    assert len(model.shadow.samples._items) <= 2 * 2000
    created_times = [tip.created_at for tip in model.shadow]
    assert created_times == sorted(created_times)
    model.fit(now)
    assert sum(model.categories.root.all_events) == 600


def serve_turns(model: ReuseModel, now: float, tenant: str, conversations: int, turn: int) -> None:
    for conversation in range(conversations):
        path = [10**9 + 1000 * conversation + depth for depth in range(4 * turn)]
        serve(model, now + 0.001 * conversation, path, tenant)


def serve_single_turns(model: ReuseModel, now: float, blocks: int, tenants: int = 1) -> None:
    """Serve prompts of 20 new blocks each, of ``tenants`` tenants in turn."""
    for number in range(blocks // 20):
        path = list(range(20 * number, 20 * number + 20))
        serve(model, now + 0.001 * number, path, f"other-{number % tenants}")


def test_conversations_are_recognised_after_many_blocks_of_another_tenant() -> None:
    model = ReuseModel(max_blocks=MAX_BLOCKS)
    serve_turns(model, 1.0, "regular", conversations=20, turn=1)
    serve_single_turns(model, 2.0, 5 * MAX_BLOCKS)
    samples_before = model.reuse_count
    serve_turns(model, 20.0, "regular", conversations=20, turn=2)
    assert model.reuse_count - samples_before == 20
    assert model.shadow.block_count <= MAX_BLOCKS


def test_tenants_beyond_a_number_share_the_blocks_of_one() -> None:
    model = ReuseModel(max_blocks=MAX_BLOCKS)
    serve_turns(model, 1.0, "regular", conversations=2, turn=1)
    serve_single_turns(model, 2.0, 20 * MAX_BLOCKS, tenants=10 * MAX_TENANTS)
    samples_before = model.reuse_count
    serve_turns(model, 50.0, "regular", conversations=2, turn=2)
    assert model.reuse_count - samples_before == 2
    assert len(model.shadow._new_blocks._items_by_tenant) <= MAX_TENANTS + 1


def test_a_tenant_alone_forgets_its_oldest_blocks() -> None:
    model = ReuseModel(max_blocks=MAX_BLOCKS)
    serve_single_turns(model, 1.0, 2 * MAX_BLOCKS)
    assert model.shadow.block_count == MAX_BLOCKS
    for block in (0, MAX_BLOCKS - 1):
        assert model.shadow.matched_blocks([block]) == 0
        assert model.shadow.matched_blocks([MAX_BLOCKS + block]) == 1


def test_a_prompt_longer_than_the_bound_is_not_recorded() -> None:
    model = ReuseModel(max_blocks=MAX_BLOCKS)
    serve_turns(model, 1.0, "regular", conversations=2, turn=1)
    serve(model, 2.0, list(range(2 * MAX_BLOCKS)), "other")
    assert model.shadow.block_count == 8
    assert list(model.shadow._new_blocks._items_by_tenant) == ["regular"]


def test_sizes_match_the_contents_after_any_sequence() -> None:
    """The sizes by tenant, the total and the index agree, within the bounds."""
    rng = random.Random(4)
    model = ReuseModel(max_blocks=MAX_BLOCKS, max_samples=300, window_s=20.0)
    now = 0.0
    for number in range(3_000):
        now += rng.choice((0.0, 0.01, 0.05, 5.0 if number % 97 == 0 else 0.0))
        tenant = f"t{min(9, int(rng.expovariate(0.5)))}"
        start = 1000 * number if rng.random() < 0.8 else 1000 * rng.randrange(number + 1)
        serve(model, now, [start + depth for depth in range(rng.randint(1, 40))], tenant)
        window = model.shadow._new_blocks
        sizes = [owner.size for owner in window._items_by_tenant.values()]
        assert all(sizes)
        assert sum(sizes) == len(window) == model.shadow.block_count <= MAX_BLOCKS
        for bounded in (window, model.shadow.samples):
            assert all(
                owner.size == sum(item.size for item in owner.items)
                for owner in bounded._items_by_tenant.values()
            )
            assert sum(item.size for item in bounded) == len(bounded) <= bounded.max_size
