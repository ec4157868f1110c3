"""The cost model recovers the engine that computed its batches, and accepts any measured times."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.schedule.cost import PRIOR, Prefill, PrefillCost

ENGINE = (0.004, 3e-5, 2e-9, 4e-6)
"""Seconds of a step, of a token, of a pair of tokens in attention, and of a loaded token."""


def engine_seconds(batch: list[Prefill], engine: tuple[float, ...] = ENGINE) -> float:
    step_s, token_s, pair_s, load_s = engine
    return step_s + sum(
        token_s * r.uncached + pair_s * r.uncached * (r.cached + r.uncached / 2) + load_s * r.loaded
        for r in batch
    )


def random_batches(count: int, seed: int, max_requests: int = 4) -> list[list[Prefill]]:
    draw = random.Random(seed)
    batches = []
    for _ in range(count):
        batch = []
        for _ in range(draw.randint(1, max_requests)):
            cached = draw.randrange(0, 30_000)
            batch.append(Prefill(draw.randrange(1, 8_000), cached, draw.randrange(0, cached + 1)))
        batches.append(batch)
    return batches


def test_an_engine_that_follows_the_model_is_fitted_exactly() -> None:
    cost = PrefillCost()
    for batch in random_batches(200, seed=1):
        cost.add(batch, engine_seconds(batch))
    cost.adopt(cost.fit())
    assert cost.coefficients == pytest.approx(ENGINE, rel=1e-6)


def test_a_request_in_a_batch_is_not_charged_for_the_others() -> None:
    """Batches have up to twelve requests: a batch can take many times as long as one of them."""
    cost = PrefillCost()
    for batch in random_batches(200, seed=2, max_requests=12):
        cost.add(batch, engine_seconds(batch))
    cost.adopt(cost.fit())
    request = Prefill(500, 2_000)
    cost_s = engine_seconds([request], cost.coefficients)
    assert cost_s == pytest.approx(engine_seconds([request]), rel=1e-6)


def small_engine_cost(step_tokens: int = 128, engine: tuple[float, ...] = (0.09, 2e-3, 0.0, 0.0)):
    """A small model on two CPU cores: a step alone costs as much as 45 tokens."""
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
    cost, steps = small_engine_cost(), 7
    chunks = [Prefill(128, 128 * i) for i in range(steps)]
    expected = sum(engine_seconds([chunk], cost.coefficients) for chunk in chunks)
    assert cost.seconds(Prefill(128 * steps)) == pytest.approx(expected)


def test_attention_over_earlier_chunks_is_counted_once() -> None:
    cost, steps = small_engine_cost(engine=(0.09, 2e-3, 3e-6, 0.0)), 9
    chunks = [Prefill(128, 50 + 128 * i) for i in range(steps)]
    expected = sum(engine_seconds([chunk], cost.coefficients) for chunk in chunks)
    assert cost.seconds(Prefill(128 * steps, 50)) == pytest.approx(expected)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=30))
def test_costs_add_up_to_the_work_of_full_steps(prompts) -> None:
    """However the prompts are cut into steps of 128 tokens: less than a step is left over."""
    cost = small_engine_cost()
    steps, last_step_tokens = divmod(sum(prompts), 128)
    full_steps_s = sum(engine_seconds([Prefill(128)], cost.coefficients) for _ in range(steps))
    queued_s = sum(cost.seconds(Prefill(n)) for n in prompts)
    assert full_steps_s <= queued_s + 1e-9
    assert queued_s <= full_steps_s + engine_seconds([Prefill(last_step_tokens)], cost.coefficients)


def test_stalled_batches_change_the_fit_by_less_than_a_tenth() -> None:
    draw, cost = random.Random(3), PrefillCost()
    for batch in random_batches(256, seed=3):
        is_stalled = draw.random() < 0.03
        cost.add(batch, engine_seconds(batch) * (100.0 if is_stalled else draw.uniform(0.9, 1.1)))
    cost.adopt(cost.fit())
    request = Prefill(2_000, 8_000)
    cost_s = engine_seconds([request], cost.coefficients)
    assert cost_s == pytest.approx(engine_seconds([request]), rel=0.1)


def test_the_fit_follows_an_engine_that_becomes_slower() -> None:
    cost, slower = PrefillCost(), tuple(3 * c for c in ENGINE)
    for batch in random_batches(300, seed=4):
        cost.add(batch, engine_seconds(batch))
    for batch in random_batches(300, seed=5):
        cost.add(batch, engine_seconds(batch, slower))
    cost.adopt(cost.fit())
    assert cost.coefficients == pytest.approx(slower, rel=1e-6)


def test_nothing_changes_before_a_fit_is_adopted() -> None:
    """Ranks time their batches differently; only what all of them adopt counts."""
    cost = PrefillCost()
    for batch in random_batches(100, seed=6):
        cost.add(batch, engine_seconds(batch))
    assert cost.coefficients == PRIOR
    cost.adopt((0.0, 0.0, 0.0, 0.0))
    assert cost.coefficients == PRIOR


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
        cost.add([Prefill(new_tokens, old_tokens, old_tokens // 2)], seconds)
    cost.adopt(cost.fit())
    assert all(c >= 0.0 and math.isfinite(c) for c in cost.coefficients)
    cost_s = cost.seconds(Prefill(uncached, cached))
    assert 0.0 < cost_s < math.inf
    assert cost.seconds(Prefill(uncached + 1, cached, cached)) >= cost_s
