import copy
import json

import pytest

from sglang_canopy.errors import CanopyError
from sglang_canopy.records import Request
from sglang_canopy.reuse.learner import ReuseModel


def learnt(**options):
    model = ReuseModel(min_samples=5, **options)
    for n in range(60):
        for turn in range(1 + n % 3):
            request = Request(
                time=n * 3.0 + turn,
                path=tuple(n * 100 + i for i in range(turn + 1)),
                prompt_tokens=turn + 1,
            )
            request.label = model.arrive(request)
            model.finish(request)
    model.fit(300.0)
    return model


def test_a_restored_model_has_the_curves_of_the_saved_one():
    model = learnt()
    again = ReuseModel(min_samples=5)
    again.restore(json.loads(json.dumps(model.state())))
    for category in model.categories:
        if category.all_events and sum(category.all_events) > 5:
            curve = again.categories.get(category.label).curve
            assert curve == pytest.approx(category.curve, abs=0.03)


def test_a_profile_counts_less_as_own_samples_come_in():
    model = learnt()
    again = ReuseModel(min_samples=5)
    again.restore(model.state())
    before = sum(again.categories.root.all_events)
    again.samples = 10 * int(before)
    again.fit(0.0)
    assert sum(again.categories.root.all_events) < 0.3 * before


def test_labels_beyond_the_bound_join_existing_ones():
    small = ReuseModel(min_samples=5, max_categories=4)
    small.restore(learnt().state())
    assert len(small.categories) <= 4
    assert sum(small.categories.root.all_events) > 0


def broken():
    good = json.loads(json.dumps(learnt().state()))
    label = next(iter(good["categories"]))

    def with_counts(key, values):
        changed = copy.deepcopy(good)
        changed["categories"][label][key] = values
        return changed

    yield "no object", [1, 2]
    yield "no version", {"categories": {}}
    yield "other version", {**good, "version": 2}
    yield "no labels", {key: value for key, value in good.items() if key != "labels"}
    yield "no categories", {"version": 3}
    yield "categories is a list", {**good, "categories": []}
    yield "short counts", with_counts("events", [1.0])
    yield "negative", with_counts("sums", [-1.0, 0.0])
    yield "not a number", with_counts("sums", [float("nan"), 0.0])
    yield "infinite", with_counts("sums", [float("inf"), 0.0])
    yield "text", with_counts("sums", ["1", "2"])
    yield "missing", with_counts("growth", None)
    yield "huge number", with_counts("sums", [10**400, 0.0])
    yield "lone surrogate", {**good, "categories": {"\ud800": good["categories"][label]}}
    yield "huge label", {**good, "categories": {"x" * 10_000: {}}}


@pytest.mark.parametrize(
    ("what", "state"), list(broken()), ids=lambda v: v if isinstance(v, str) else ""
)
def test_refuses_a_malformed_profile_whole(what, state):
    model = ReuseModel()
    with pytest.raises(CanopyError, match="profile"):
        model.restore(state)
    assert model.state()["categories"] == {}
    assert len(model.categories) == 2


def test_a_profile_of_other_categories_is_refused():
    """``text|turn1`` of one would be read as a stop reason by the other."""
    model = ReuseModel(type_turn=True)
    with pytest.raises(CanopyError, match=r"'refined'.*'type-turn'"):
        model.restore(learnt().state())
    assert len(model.categories) == 2


def test_a_restored_exponential_has_the_lifespans_of_the_saved_one():
    model = learnt(exponential=True)
    again = ReuseModel(min_samples=5, exponential=True)
    again.restore(json.loads(json.dumps(model.state())))
    saved, restored = (m.categories.root.exponential for m in (model, again))
    assert restored.life_s == pytest.approx(saved.life_s) != 0.0
    assert restored.mean_gap_s == pytest.approx(saved.mean_gap_s)
