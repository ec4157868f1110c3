"""The cost model recovers the coefficients of the engine that it measured, and accepts any measured times."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.schedule.cost import PRIOR_COEFFICIENTS, Prefill, PrefillCost

ENGINE_SECONDS = (0.004, 3e-5, 2e-9, 4e-6)
"""Seconds of a step, of a new token, of a pair of tokens in attention, and of a loaded token."""


def engine_seconds(batch: list[Prefill], engine: tuple[float, ...] = ENGINE_SECONDS) -> float:
    step_s, token_s, pair_s, load_s = engine
    uncached_tokens = sum(prefill.uncached for prefill in batch)
    pairs = sum(prefill.uncached * (prefill.cached + prefill.uncached / 2) for prefill in batch)
    loaded_tokens = sum(prefill.loaded for prefill in batch)
    return step_s + token_s * uncached_tokens + pair_s * pairs + load_s * loaded_tokens


def random_batches(batch_count: int, seed: int, max_requests: int = 4) -> list[list[Prefill]]:
    rng = random.Random(seed)
    batches = []
    for _ in range(batch_count):
        batch = []
        for _ in range(rng.randint(1, max_requests)):
            cached = rng.randrange(0, 30_000)
            batch.append(Prefill(rng.randrange(1, 8_000), cached, rng.randrange(0, cached + 1)))
        batches.append(batch)
    return batches


def test_an_engine_that_follows_the_model_is_fitted_exactly() -> None:
    cost = PrefillCost()
    for batch in random_batches(200, seed=1):
        cost.record_batch(batch, engine_seconds(batch))
    cost.adopt(cost.fit())
    assert cost.coefficients == pytest.approx(ENGINE_SECONDS, rel=1e-6)


def test_a_request_in_a_batch_is_not_charged_for_the_others() -> None:
    """Batches have up to twelve requests: a batch can take many times as long as one of them."""
    cost = PrefillCost()
    for batch in random_batches(200, seed=2, max_requests=12):
        cost.record_batch(batch, engine_seconds(batch))
    cost.adopt(cost.fit())
    request = Prefill(500, 2_000)
    cost_s = engine_seconds([request], cost.coefficients)
    assert cost_s == pytest.approx(engine_seconds([request]), rel=1e-6)


def small_engine_cost(step_tokens: int = 128, engine: tuple[float, ...] = (0.09, 2e-3, 0.0, 0.0)):
    """Return the cost of a small model on two CPU cores: a step itself costs as much as 45 tokens."""
    cost = PrefillCost(step_tokens)
    cost.adopt(engine)
    return cost


def test_a_short_prompt_is_not_charged_a_step_that_it_shares() -> None:
    """A queue of five prompts of 20 tokens is one step of 100, not five."""
    cost, short_prompt, whole_queue = small_engine_cost(), Prefill(20), Prefill(100)
    assert 5 * cost.seconds(short_prompt) == pytest.approx(cost.seconds(whole_queue))
    step_s = engine_seconds([Prefill(128)], cost.coefficients)
    assert cost.seconds(Prefill(128)) == pytest.approx(step_s)


def test_a_prompt_longer_than_a_step_pays_for_each() -> None:
    cost, step_count = small_engine_cost(), 7
    chunks = [Prefill(128, 128 * i) for i in range(step_count)]
    expected_s = sum(engine_seconds([chunk], cost.coefficients) for chunk in chunks)
    assert cost.seconds(Prefill(128 * step_count)) == pytest.approx(expected_s)


def test_attention_over_earlier_chunks_is_counted_once() -> None:
    cost, step_count = small_engine_cost(engine=(0.09, 2e-3, 3e-6, 0.0)), 9
    chunks = [Prefill(128, 50 + 128 * i) for i in range(step_count)]
    expected_s = sum(engine_seconds([chunk], cost.coefficients) for chunk in chunks)
    assert cost.seconds(Prefill(128 * step_count, 50)) == pytest.approx(expected_s)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=30))
def test_costs_add_up_to_the_work_of_full_steps(prompts_tokens) -> None:
    """The costs of prompts differ from the work of full steps of 128 tokens by less than a step."""
    cost = small_engine_cost()
    full_steps, last_step_tokens = divmod(sum(prompts_tokens), 128)
    full_steps_s = sum(engine_seconds([Prefill(128)], cost.coefficients) for _ in range(full_steps))
    queued_s = sum(cost.seconds(Prefill(tokens)) for tokens in prompts_tokens)
    assert full_steps_s <= queued_s + 1e-9
    assert queued_s <= full_steps_s + engine_seconds([Prefill(last_step_tokens)], cost.coefficients)


def test_stalled_batches_change_the_fit_by_less_than_a_tenth() -> None:
    rng, cost = random.Random(3), PrefillCost()
    for batch in random_batches(256, seed=3):
        slowdown = 100.0 if rng.random() < 0.03 else rng.uniform(0.9, 1.1)
        cost.record_batch(batch, engine_seconds(batch) * slowdown)
    cost.adopt(cost.fit())
    request = Prefill(2_000, 8_000)
    cost_s = engine_seconds([request], cost.coefficients)
    assert cost_s == pytest.approx(engine_seconds([request]), rel=0.1)


def test_the_fit_follows_an_engine_that_becomes_slower() -> None:
    cost, slower = PrefillCost(), tuple(3 * seconds for seconds in ENGINE_SECONDS)
    for batch in random_batches(300, seed=4):
        cost.record_batch(batch, engine_seconds(batch))
    for batch in random_batches(300, seed=5):
        cost.record_batch(batch, engine_seconds(batch, slower))
    cost.adopt(cost.fit())
    assert cost.coefficients == pytest.approx(slower, rel=1e-6)


def test_nothing_changes_before_a_fit_is_adopted() -> None:
    """Ranks measure different times, so only coefficients that all of them adopt may count."""
    cost = PrefillCost()
    for batch in random_batches(100, seed=6):
        cost.record_batch(batch, engine_seconds(batch))
    assert cost.coefficients == PRIOR_COEFFICIENTS
    cost.adopt((0.0, 0.0, 0.0, 0.0))
    assert cost.coefficients == PRIOR_COEFFICIENTS


@given(
    st.lists(
        st.tuples(
            st.integers(0, 100_000),
            st.integers(0, 100_000),
            st.floats(allow_nan=True, allow_infinity=True),
        ),
        max_size=40,
    ),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
)
def test_costs_are_finite_above_zero_and_grow_with_work(measured, uncached, cached) -> None:
    cost = PrefillCost()
    for new_tokens, old_tokens, seconds in measured:
        cost.record_batch([Prefill(new_tokens, old_tokens, old_tokens // 2)], seconds)
    cost.adopt(cost.fit())
    assert all(seconds >= 0.0 and math.isfinite(seconds) for seconds in cost.coefficients)
    cost_s = cost.seconds(Prefill(uncached, cached))
    assert 0.0 < cost_s < math.inf
    assert cost.seconds(Prefill(uncached + 1, cached, cached)) >= cost_s
