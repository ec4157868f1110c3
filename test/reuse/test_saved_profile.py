"""A model of reuse that one server saves and another restores."""

import copy
import json

import pytest

from sglang_canopy.errors import CanopyError
from sglang_canopy.records import Request
from sglang_canopy.reuse.learner import ReuseModel


def trained_model(**options):
    model = ReuseModel(min_samples=5, **options)
    for number in range(60):
        for turn in range(1 + number % 3):
            request = Request(
                time=number * 3.0 + turn,
                path=tuple(number * 100 + i for i in range(turn + 1)),
                prompt_tokens=turn + 1,
            )
            request.label = model.arrive(request)
            model.finish(request)
    model.fit(300.0)
    return model


def test_a_restored_model_has_the_curves_of_the_saved_one():
    model = trained_model()
    restored_model = ReuseModel(min_samples=5)
    restored_model.restore(json.loads(json.dumps(model.state())))
    for category in model.categories:
        if category.all_events and sum(category.all_events) > 5:
            curve = restored_model.categories.get(category.label).curve
            assert curve == pytest.approx(category.curve, abs=0.03)


def test_a_profile_counts_less_as_own_samples_come_in():
    model = trained_model()
    restored_model = ReuseModel(min_samples=5)
    restored_model.restore(model.state())
    profile_events = sum(restored_model.categories.root.all_events)
    restored_model.reuse_count = 10 * int(profile_events)
    restored_model.fit(0.0)
    assert sum(restored_model.categories.root.all_events) < 0.3 * profile_events


def test_a_restored_profile_keeps_the_bound_on_categories():
    small_model = ReuseModel(min_samples=5, max_categories=4)
    small_model.restore(trained_model().state())
    assert len(small_model.categories) <= 4
    assert sum(small_model.categories.root.all_events) > 0


def malformed_profiles():
    state = json.loads(json.dumps(trained_model().state()))
    label = next(iter(state["categories"]))

    def with_counts(key, values):
        changed_state = copy.deepcopy(state)
        changed_state["categories"][label][key] = values
        return changed_state

    yield "no object", [1, 2]
    yield "no version", {"categories": {}}
    yield "other version", {**state, "version": 2}
    yield "no labels", {key: value for key, value in state.items() if key != "labels"}
    yield "no categories", {"version": 3}
    yield "categories is a list", {**state, "categories": []}
    yield "short counts", with_counts("events", [1.0])
    yield "negative", with_counts("sums", [-1.0, 0.0])
    yield "not a number", with_counts("sums", [float("nan"), 0.0])
    yield "infinite", with_counts("sums", [float("inf"), 0.0])
    yield "text", with_counts("sums", ["1", "2"])
    yield "missing", with_counts("growth", None)
    yield "huge number", with_counts("sums", [10**400, 0.0])
    yield "lone surrogate", {**state, "categories": {"\ud800": state["categories"][label]}}
    yield "huge label", {**state, "categories": {"x" * 10_000: {}}}


@pytest.mark.parametrize(
    ("damage", "state"), list(malformed_profiles()), ids=lambda v: v if isinstance(v, str) else ""
)
def test_a_malformed_profile_changes_nothing(damage, state):
    model = ReuseModel()
    with pytest.raises(CanopyError, match="profile"):
        model.restore(state)
    assert model.state()["categories"] == {}
    assert len(model.categories) == len(ReuseModel().categories)


def test_a_profile_of_other_categories_is_refused():
    """One would read ``turn1`` of the other's ``text|turn1`` as a stop reason."""
    model = ReuseModel(uses_type_turn=True)
    with pytest.raises(CanopyError, match=r"'refined'.*'type-turn'"):
        model.restore(trained_model().state())
    assert len(model.categories) == len(ReuseModel().categories)


def test_a_restored_exponential_has_the_lifespans_of_the_saved_one():
    model = trained_model(fits_exponential=True)
    restored_model = ReuseModel(min_samples=5, fits_exponential=True)
    restored_model.restore(json.loads(json.dumps(model.state())))
    saved_fit, restored_fit = (each.categories.root.exponential for each in (model, restored_model))
    assert restored_fit.life_s == pytest.approx(saved_fit.life_s) != 0.0
    assert restored_fit.mean_gap_s == pytest.approx(saved_fit.mean_gap_s)
