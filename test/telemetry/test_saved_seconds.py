"""Seconds that hits saved, against the cost model that a queue charges."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.radix.counters import Counters
from sglang_canopy.schedule.prefill_cost import Prefill, PrefillCost
from sglang_canopy.telemetry.prefill_seconds import PrefillSeconds, status_of

REQUESTS = st.lists(
    st.integers(1, 50_000).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=20
)


def sums_of(counters: Counters) -> tuple[int, int, int, int]:
    (row,) = counters.rows()
    hits = sum(tier.hits for tier in row.tiers)
    return row.prompt_tokens, hits, counters.prompt_squares, counters.hit_squares


@given(REQUESTS.filter(len))
def test_saved_and_computed_seconds_follow_the_model(requests) -> None:
    cost, counters, found = PrefillCost(8192), Counters(), PrefillSeconds()
    cost.adopt((0.004, 3e-5, 2e-9, 0.0))
    whole = left = 0.0
    for prompt, hit in requests:
        counters.served("chat", prompt, (hit, 0, 0))
        found.add(sums_of(counters), *cost.token_costs())
        whole += cost.seconds(Prefill(prompt))
        left += cost.seconds(Prefill(prompt - hit, hit))
    assert found.computed_s == pytest.approx(left, rel=1e-6, abs=1e-4)
    assert found.saved_s == pytest.approx(whole - left, rel=1e-6, abs=1e-4)


def test_requests_before_the_first_fit_count_with_it() -> None:
    found = PrefillSeconds()
    assert status_of(found, math.inf) is None
    found.add((1000, 500, 10**6, 250_000), 1e-3, 1e-6)
    assert status_of(found, 1000.0) == {
        "saved_s": pytest.approx(0.5 + 0.125),
        "computed_s": pytest.approx(0.5 + 0.375),
        "depth_scale_tokens": 1000,
    }


def test_a_new_fit_does_not_change_earlier_counts() -> None:
    found = PrefillSeconds()
    found.add((1000, 500, 10**6, 250_000), 1e-3, 0.0)
    before = found.saved_s
    found.add((2000, 1000, 2 * 10**6, 500_000), 2e-3, 0.0)
    assert found.saved_s == pytest.approx(before + 1.0)
