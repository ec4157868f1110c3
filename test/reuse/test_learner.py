"""Samples of reuse that a model learns from requests, their categories, and the bounds of both."""

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.records import Request
from sglang_canopy.reuse.categories import Categories
from sglang_canopy.reuse.hint_trust import MAX_RECORDS, NO_RECORD
from sglang_canopy.reuse.learner import ReuseModel, mean_growth_tokens
from sglang_canopy.reuse.survival import AGE_BINS, TOKEN_BINS, age_bin


def serve(model, time, path, *, tokens=None, finishes=True, block_tokens=1, **fields):
    request = Request(
        time=float(time),
        path=list(path),
        block_tokens=block_tokens,
        prompt_tokens=len(path) * block_tokens if tokens is None else tokens,
        **fields,
    )
    request.label = model.arrive(request)
    if finishes:
        request.label = model.finish(request)
    return request


def events_by_label(model):
    used_categories = (category for category in model.categories if any(category.events))
    return {category.label: sum(category.events) for category in used_categories}


@pytest.fixture
def model():
    return ReuseModel()


def test_a_request_that_extends_a_path_is_a_sample_of_the_category_that_left_it(model):
    serve(model, 0, [1, 2], category="chat")
    second = serve(model, 5, [1, 2, 3], category="chat")
    assert events_by_label(model) == {"chat|-|turn1|out<64": 1.0}
    assert model.categories.get("chat|-|turn1|out<64").events[age_bin(5.0)] == 1.0
    assert second.turn == 2
    assert second.label == "chat|-|turn2|out<64"


def test_the_stop_reason_counts_once_it_is_known(model):
    serve(model, 0, [1, 2], category="agent", stop="tool", output_tokens=300)
    serve(model, 5, [1, 2, 3], category="agent", stop="tool", output_tokens=300)
    assert events_by_label(model) == {"agent|tool|out<512": 1.0}


def test_added_tokens_refine_the_category_if_enabled():
    model = ReuseModel(uses_added_tokens=True)
    first = serve(model, 0, range(1, 1001), output_tokens=100)
    assert first.label == "default|-|turn1|out<256|added<4096"
    # It extends a prompt of 1,000 and an answer of 100 tokens by 50.
    continuation = serve(model, 5, range(1, 1151), output_tokens=10)
    assert continuation.label == "default|-|turn2|out<64|added<512"
    # Another's first turn, which shares 600 tokens, brings in the rest.
    branch = serve(model, 6, [*range(1, 601), *range(5001, 9601)])
    assert branch.label == "default|-|turn1|out<64|added>=4096"
    assert serve(model, 7, [1], stop="tool").label == "default|tool|out<64"


def test_after_a_tool_call_the_conversations_own_gaps_refine_the_category(model):
    serve(model, 0, [1], stop="tool")
    assert serve(model, 5, [1, 2], stop="tool").label == "default|tool|out<64|gap<8s"
    # The geometric mean of 5 and 500 s.
    assert serve(model, 505, [1, 2, 3], stop="tool").label == "default|tool|out<64|gap<120s"
    plain_model = ReuseModel(uses_own_gaps=False)
    serve(plain_model, 0, [1], stop="tool")
    assert serve(plain_model, 5, [1, 2], stop="tool").label == "default|tool|out<64"


def test_a_path_is_followed_though_its_last_block_was_partial(model):
    serve(model, 0, [1, 2, 30], tokens=40, block_tokens=16)  # 30 is half full
    serve(model, 5, [1, 2, 31, 4], tokens=60, block_tokens=16)
    assert sum(events_by_label(model).values()) == 1.0


def test_a_path_extended_over_the_output_is_followed_with_or_without_it():
    for continued in ([1, 2, 3, 4, 5], [1, 2, 9, 9, 9]):
        model = ReuseModel()
        request = serve(model, 0, [1, 2], finishes=False)
        request.path.extend([3, 4])
        request.output_tokens = 2
        request.label = model.finish(request)
        assert serve(model, 5, continued).turn == 2
        assert sum(events_by_label(model).values()) >= 1.0


def test_a_tip_is_continued_once(model):
    serve(model, 0, [1, 2])
    serve(model, 5, [1, 2, 3])
    serve(model, 6, [1, 2, 4])  # a second branch of the same tip: a shared prefix
    assert events_by_label(model) == {"default|-|turn1|out<64": 1.0}
    serve(model, 8, [1, 2, 5])
    shared_labels = [label for label in events_by_label(model) if "shared" in label]
    # The prefix was first seen at 0 and its second use counted at 6: one use every 6 s.
    assert shared_labels == ["shared prefix|every<16s|uses1-2"]


def test_a_prompt_that_ends_inside_a_known_prefix_is_no_conversation(model):
    serve(model, 0, [1, 2, 3, 4])
    length_before = len(model.shadow)
    assert serve(model, 1, [1, 2]).turn == 1
    serve(model, 2, [1, 2, 9])
    assert all("turn2" not in category.label for category in model.categories)
    assert len(model.shadow) > length_before


def test_tips_without_continuation_lower_the_return_probability():
    model = ReuseModel(min_samples=10)
    for n in range(40):
        serve(model, n, [n * 10, n * 10 + 1])
        if n % 4 == 0:
            serve(model, n + 0.5, [n * 10, n * 10 + 1, n * 10 + 2])
    model.fit(1000.0)
    category = model.categories.get("default|-|turn1|out<64")
    assert 1.0 - category.curve[-1] == pytest.approx(0.25, abs=0.05)


def test_prompt_growth_is_what_the_next_prompt_adds_to_prompt_and_output():
    model = ReuseModel(min_samples=1)
    serve(model, 0, range(100), output_tokens=50)
    assert model.reuse_count == 0
    serve(model, 5, range(250), output_tokens=50)
    model.fit(6.0)
    assert mean_growth_tokens(model.categories.get("default|-|turn1|out<64")) == 100.0
    assert model.reuse_count == 1


@pytest.mark.parametrize(("output_tokens", "growth"), [(0, 1.0), (1, 0.0)])
def test_samples_older_than_the_window_are_dropped(output_tokens, growth):
    model = ReuseModel(window_s=100.0)
    serve(model, 0, [1], output_tokens=output_tokens)
    serve(model, 5, [1, 2])
    assert sum(events_by_label(model).values()) == 1.0
    category = model.categories.get("default|-|turn1|out<64")
    sums = category.gap_sum_s, sum(category.growth), category.growth_sum_tokens
    assert sums == (5.0, 1.0, growth)
    serve(model, 500, [9])
    assert sum(events_by_label(model).values()) == 0.0
    assert (category.gap_sum_s, sum(category.growth), category.growth_sum_tokens) == (0.0, 0.0, 0.0)
    assert len(model.shadow) == 1
    assert model.shadow.block_count == 1


def test_hints_are_checked_against_later_requests(model):
    serve(model, 0, [1], return_in_s=20.0)
    serve(model, 22, [1, 2], return_in_s=20.0)  # true: within half of the given time
    serve(model, 92, [1, 2, 3], over=True)  # 70 s instead of 20
    serve(model, 93, [1, 2, 3, 4])  # not over
    record = model.hints.record(None)
    assert (record.return_hints, record.true_return_hints) == (2, 1)
    assert (record.over_hints, record.wrong_over_hints) == (1, 1)


def test_false_returns_of_new_tenants_reduce_newcomers_trust(model):
    serve(model, 0, ["sure"], return_in_s=10.0, tenant="sure")
    serve(model, 10, ["sure", "again"], tenant="sure")
    probability_before = model.hints.return_probability(NO_RECORD)
    for n in range(100):  # each invented tenant hints once, and never returns
        serve(model, 20.0 + n, [f"x{n}"], return_in_s=1.0, tenant=f"invented{n}")
    assert probability_before > 0.5 > model.hints.return_probability("unknown") > 0.0


def test_one_tenants_false_returns_do_not_reduce_newcomers_trust(model):
    for n in range(100):
        serve(model, 20.0 + n, [f"x{n}"], return_in_s=1.0, tenant="wrong")
    assert model.hints.return_probability("wrong") < 0.1
    assert model.hints.return_probability("unknown") > 0.5


def test_a_tenant_earns_trust_while_newcomers_have_none(model):
    for n in range(100):
        serve(model, n, [f"x{n}"], return_in_s=1.0, tenant=f"invented{n}")
    for n in range(4):
        path = [f"right{i}" for i in range(n + 1)]
        serve(model, 200.0 + 10 * n, path, return_in_s=10.0, tenant="right")
    assert model.hints.return_probability("right") > 0.5


def test_tenants_with_tracked_hints_are_bounded_and_the_least_recent_is_dropped():
    hints = ReuseModel().hints
    first = hints.record("first")
    for n in range(MAX_RECORDS - 1):
        hints.record(f"t{n}")
    assert hints.record("first") is first
    hints.record("one more")
    assert len(hints._records) == MAX_RECORDS
    assert hints.trust_key("t0") == NO_RECORD
    assert hints.record("first") is first


def test_client_names_cannot_exceed_the_bound_on_categories():
    model = ReuseModel(max_categories=64)
    for n in range(1000):
        serve(model, n, [10 * n, 10 * n + 1], category=f"name-{n}|" + "x" * 1000)
    assert len(model.categories) <= 64
    assert all(len(category.label) < 200 for category in model.categories)
    assert serve(model, 2000, [7], category="another").label == "overflow"


CATEGORY_COUNTS = {
    "events": [1.0] * AGE_BINS,
    "waiting": [0.0] * AGE_BINS,
    "growth": [0.0] * TOKEN_BINS,
    "sums": [1.0, 1.0],
    "lives": [0.0, 0.0],
}

REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.lists(st.integers(0, 2), min_size=0, max_size=6),
        st.sampled_from([None, "tool", "end", "odd"]),
        st.booleans(),
    ),
    max_size=80,
)


def chained_ids(path):
    """Return chained ids: equal ids mean equal prefixes."""
    ids = []
    for block in path:
        ids.append(hash((ids[-1] if ids else 0, block)) & 0xFFFFFFFF)
    return ids


@given(REQUESTS, st.integers(1, 20), st.integers(1, 20))
def test_tips_blocks_and_categories_are_bounded_and_consistent(requests, max_samples, max_blocks):
    bounds = {"max_samples": max_samples, "max_blocks": max_blocks, "max_categories": 16}
    model = ReuseModel(window_s=60.0, min_samples=2, **bounds)
    now = 0.0
    for pause_s, path, stop, finishes in requests:
        now += pause_s
        serve(model, now, chained_ids(path), stop=stop, finishes=finishes, return_in_s=5.0)
        shadow = model.shadow
        assert len(shadow) <= max_samples
        assert shadow.block_count <= max(max_blocks, len(path))
        assert len(model.categories) <= 16
        closed_tips = [tip for tip in shadow if not tip.is_open]
        assert sum(events_by_label(model).values()) == len(closed_tips)
        indexed = [key for tip in shadow for key in tip.indexed_at]
        assert len(shadow._tips) + len(shadow._junctions) == len(indexed)


@given(REQUESTS)
def test_equal_requests_give_equal_labels_and_curves(requests):
    models = ReuseModel(min_samples=2), ReuseModel(min_samples=2)
    now = 0.0
    for pause_s, path, stop, finishes in requests:
        now += pause_s
        fields = {"stop": stop, "finishes": finishes}
        labels = [serve(model, now, chained_ids(path), **fields).label for model in models]
        assert labels[0] == labels[1]
    for model in models:
        model.fit(now)
    ranks = [{category.label: category.rank for category in model.categories} for model in models]
    assert ranks[0] == ranks[1]


def test_a_learner_filled_to_a_tenth_of_its_default_bounds_holds_less_than_16_mb():
    tracemalloc.start()
    try:
        model = ReuseModel(max_samples=10_000, max_blocks=100_000)
        rng = random.Random(1)
        for n in range(11_000):
            serve(model, 0.05 * n, [rng.getrandbits(63) for _ in range(10)], block_tokens=64)
        traced_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert (len(model.shadow), model.shadow.block_count) == (10_000, 100_000)
    assert traced_bytes < 16e6


def serve_new_names(model, tenant, name_count, start=0.0, prefix="x"):
    """Serve one request a second, each with a category of its own."""
    for n in range(name_count):
        names = {"category": f"{prefix}-{n}", "tenant": tenant}
        serve(model, start + n, [f"{prefix}{n}"], stop="end", **names)


def label_of_new(model, time, category="chat", stop="end", tenant="regular"):
    """Serve a first turn; return its label."""
    path = [f"{tenant}-{category}-{time}"]
    return serve(model, time, path, category=category, stop=stop, turn=1, tenant=tenant).label


def test_many_new_names_overflow_their_sender_alone(model):
    serve_new_names(model, "inventive", 1000)
    assert label_of_new(model, 1001.0) == "chat|end|turn1|out<64"
    assert label_of_new(model, 1002.0, "agent", "tool") == "agent|tool|out<64"
    assert label_of_new(model, 1003.0, "x-999", tenant="inventive") == "overflow"
    assert label_of_new(model, 1004.0) == "chat|end|turn1|out<64"


def test_many_new_names_do_not_take_the_labels_that_a_tenant_has(model):
    labels_before = [label_of_new(model, float(n), f"name{n}") for n in range(8)]
    for tenant in range(40):
        serve_new_names(model, f"inventive{tenant}", 50, 100.0 + 50 * tenant, f"h{tenant}")
    assert [label_of_new(model, 3000.0 + n, f"name{n}") for n in range(8)] == labels_before
    assert len(model.categories) <= 256


def test_a_late_tenant_takes_a_name_that_it_uses_from_names_that_were_used_once(model):
    for tenant in range(16):
        serve_new_names(model, f"inventive{tenant}", 50, 50.0 * tenant, f"h{tenant}")
    assert label_of_new(model, 1000.0) == "overflow"
    for n in range(200):
        assert label_of_new(model, 1001.0 + n) == "chat|end|turn1|out<64"
        serve_new_names(model, f"inventive{n % 16}", 1, 1001.5 + n, f"late{n}")
    assert len(model.categories) <= 256


def test_names_that_wait_for_a_label_and_tenants_without_any_are_bounded():
    categories = Categories(64)
    for n in range(5000):
        for _ in range(2):
            categories.refine((f"name{n}",), f"tenant{n}", float(n))
    assert len(categories._requested_names) <= 64
    assert len(categories._names_by_tenant) <= 16


def test_shared_prefixes_have_labels_among_many_new_names(model):
    serve_new_names(model, "inventive", 1000)
    assert model.shared_category(9, 0.5).label == "shared prefix|every<1s|uses9-16"


def test_names_unused_for_a_window_are_forgotten():
    model = ReuseModel(window_s=100.0)
    serve_new_names(model, "a", 60)
    for n in range(300):
        label_of_new(model, 200.0 + n, "new")
    labels = [category.label for category in model.categories]
    assert not [label for label in labels if label.startswith("x-")]
    assert "new|end|turn1|out<64" in labels


def test_a_label_that_is_forgotten_leaves_its_samples_to_the_coarser_one(model):
    serve(model, 0, [1], category="old", stop="end")
    serve(model, 5, [1, 2], category="old", stop="end")
    samples_before = sum(events_by_label(model).values())
    categories = model.categories
    for category in reversed(list(categories)):
        if category.label.startswith("old"):
            categories.forget(category)
    assert "old" not in [category.label for category in categories]
    assert sum(events_by_label(model).values()) == samples_before
    assert categories.get("old|end|turn1|out<64") is categories.overflow
    serve(model, 9, [1, 2, 3], category="old", stop="end")
    assert sum(events_by_label(model).values()) == samples_before + 1
    model.fit(10.0)


def test_a_saved_profile_has_no_unused_names():
    model = ReuseModel(window_s=100.0)
    model.restore({"version": 3, "labels": "refined", "categories": {"ghost": CATEGORY_COUNTS}})
    for n in range(300):
        label_of_new(model, 1000.0 + n)
    assert set(model.state()["categories"]) == {"chat|end|turn1|out<64"}


def test_a_shared_prefix_lives_until_its_last_use():
    model = ReuseModel(fits_exponential=True, min_samples=1)
    for n in range(5):
        serve(model, 10 * n, ["system", f"question {n}"])
    model.fit(50.0)
    shared = model.categories.get("shared prefix")
    # Opened at 10 s by the second request, used at 20, 30 and 40 s, and once it was the last.
    assert (shared.all_life_sum_s, shared.all_life_count) == (30.0 + 20.0 + 10.0 + 0.0, 4.0)


def test_hints_are_checked_in_a_conversation_that_rewrites_its_history(model):
    for n in range(6):
        time_s = 100 * n
        serve(model, time_s, [n, 10 + n, 20 + n], tenant="t", conversation=n, return_in_s=5.0)
        serve(model, time_s + 5, [n, 30 + n, 40 + n], tenant="t", conversation=n, over=True)
    model.arrive(Request(time=1000.0, path=[999], prompt_tokens=1))
    assert model.hints.is_return_trusted("t")
    assert model.hints.is_over_trusted("t")
    assert not events_by_label(model)  # the old paths were not used again


def test_an_end_that_a_rewritten_history_contradicts_counts_as_wrong(model):
    for n in range(6):
        serve(model, 100 * n, [n, 10 + n], tenant="t", conversation=n, over=True)
        serve(model, 100 * n + 5, [n, 30 + n], tenant="t", conversation=n)
    assert not model.hints.is_over_trusted("t")


def test_curves_do_not_depend_on_when_they_are_read():
    """Ranks of one replica read curves at different times, for only some evict or explain evictions."""
    rng = random.Random(5)
    read_often, read_last = ReuseModel(max_categories=24), ReuseModel(max_categories=24)
    paths: dict[int, list[int]] = {}
    for number in range(1500):
        client = rng.randrange(60)
        path = paths.setdefault(client, [client])
        path.append(1000 * client + len(path))
        for model in (read_often, read_last):
            serve(model, number / 2, path, category=f"name{client % 12}", tokens=5 * len(path))
        for category in read_often.categories:
            assert len(category.rank) == len(category.curve) == AGE_BINS
            assert len(category.growth_exceedance) == TOKEN_BINS
    assert read_last.version > 10
    for first, second in zip(read_often.categories, read_last.categories, strict=True):
        assert (first.label, first.curve) == (second.label, second.curve)
        assert (first.rank, first.growth_exceedance) == (second.rank, second.growth_exceedance)
