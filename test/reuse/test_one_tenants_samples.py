"""A tenant's requests do not displace the samples of others, and no arrival costs much more."""

from collections import Counter

from sglang_canopy.records import Request
from sglang_canopy.reuse.learner import MAX_JUNCTIONS, ReuseModel

BLOCKS = 400


def ask(model: ReuseModel, now: float, path: list[int], tenant: str | None, kind: str) -> int:
    """Serve a request; return the number of samples that it added."""
    before = model.samples + len(model.shadow)
    request = Request(now, kind, path, 64, 64 * len(path), tenant=tenant)
    model.arrive(request)
    request.output_tokens, request.stop = 64, "end"
    model.finish(request)
    return model.samples + len(model.shadow) - before


def taught(model: ReuseModel, talks: int, tenant: str = "honest") -> float:
    now = 0.0
    for talk in range(talks):
        path = [10**9 + 100 * talk + i for i in range(12)]
        for turn in (4, 8, 12):
            now += 0.1
            ask(model, now, path[:turn], tenant, "support")
    return now


def held(model: ReuseModel) -> Counter[str | None]:
    return Counter(tip.tenant for tip in model.shadow)


def test_a_prompt_with_many_branches_is_few_samples_a_request() -> None:
    model = ReuseModel(added=True)
    now, most = taught(model, 500), 0
    trunk = list(range(1, BLOCKS + 1))
    ask(model, now, trunk, "other", "chat")
    # Branch off the long prompt ever closer to its start, then ever further from it.
    for place in (*range(BLOCKS - 1, BLOCKS // 2, -1), *range(1, BLOCKS // 2)):
        now += 0.01
        ask(model, now, [*trunk[:place], 10**7 + place], "other", "chat")
    for number in range(100):
        now += 0.01
        most = max(most, ask(model, now, [*trunk, 2 * 10**7 + number], "other", "chat"))
    assert most <= 2 * (MAX_JUNCTIONS + 1)
    assert held(model)["honest"] == 1500
    assert len(model.shadow.junctions(trunk)) == MAX_JUNCTIONS


def test_junctions_that_are_given_up_do_not_teach_that_prefixes_do_not_return() -> None:
    model = ReuseModel()
    trunk, now = list(range(1, BLOCKS + 1)), 1.0
    ask(model, now, trunk, None, "chat")
    for place in range(BLOCKS - 1, 0, -1):
        now += 0.01
        ask(model, now, [*trunk[:place], 10**7 + place], None, "chat")
    for number in range(50):
        now += 0.01
        ask(model, now, [*trunk, 2 * 10**7 + number], None, "chat")
    model.fit(now)
    shared = next(c for c in model.categories if c.label == "shared prefix")
    assert sum(shared.all_waiting) <= 2 * MAX_JUNCTIONS
    assert sum(shared.all_events) >= 40 * MAX_JUNCTIONS


def test_the_tenant_with_most_samples_makes_room_in_a_full_window() -> None:
    model = ReuseModel(max_samples=2000)
    now = taught(model, 300)
    for number in range(5000):
        now += 0.01
        ask(model, now, [10**7 + number], "other", "chat")
    assert held(model) == {"honest": 900, "other": 1100}
    assert len(model.shadow) == 2000
    assert len(model.shadow.samples._items) <= 2 * 2000
    born = [tip.born for tip in model.shadow]
    assert born == sorted(born)
    model.fit(now)
    assert sum(model.categories.root.all_events) == 600


def test_samples_expire_with_the_window_for_any_tenant() -> None:
    model = ReuseModel(max_samples=100, window_s=10.0)
    taught(model, 20)
    for number in range(500):
        ask(model, 6.0 + 0.001 * number, [10**7 + number], "other", "chat")
    ask(model, 30.0, [5], "late", "chat")
    assert held(model) == {"late": 1}
    model.fit(30.0)
    assert sum(model.categories.root.all_events) == 0
    assert len(model.shadow.samples._by_tenant) == 1
