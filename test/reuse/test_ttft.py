"""The line of TTFT over prompt tokens that a server's requests give."""

import random

import pytest

from sglang_canopy.reuse.ttft import TtftFit, tokens_within_ttft


def test_the_fit_is_the_line_of_its_points():
    fit = TtftFit()
    for tokens in range(0, 10_000, 100):
        fit.add(tokens, 1e-4 * tokens + 0.05)
    assert fit.coefficients() == pytest.approx((1e-4, 0.05), rel=1e-6)


def test_without_distinct_points_there_is_no_line():
    fit = TtftFit()
    for _ in range(100):
        fit.add(500, 0.1)  # one point does not make a line
    assert fit.coefficients() is None
    assert fit.stats()["alpha_ms_per_1k_tokens"] is None


def test_queueing_spikes_barely_move_the_line():
    rng = random.Random(1)
    fit = TtftFit()
    for number in range(2000):
        tokens = rng.randrange(10_000)
        queued_s = 5.0 if number > 100 and rng.random() < 0.03 else 0.0
        fit.add(tokens, 1e-4 * tokens + 0.05 + rng.gauss(0, 0.005) + queued_s)
    token_s, base_s = fit.coefficients()
    assert token_s == pytest.approx(1e-4, rel=0.05)
    assert base_s == pytest.approx(0.05, abs=0.03)


def test_the_line_follows_a_server_that_became_slower():
    fit = TtftFit()
    for number in range(6000):
        tokens = 37 * number % 10_000
        fit.add(tokens, (1e-4 if number < 1000 else 2e-4) * tokens + 0.05)
    token_s, _ = fit.coefficients()
    assert token_s == pytest.approx(2e-4, rel=0.05)


def test_invalid_measurements_are_ignored():
    fit = TtftFit()
    for tokens, seconds in ((float("nan"), 1.0), (-5, 1.0), (5, -1.0), (5, float("inf"))):
        fit.add(tokens, seconds)
    assert fit.count == 0


def test_a_ttft_target_is_a_number_of_tokens():
    assert tokens_within_ttft(250.0, (1e-4, 0.05)) == pytest.approx(2000.0)
    assert tokens_within_ttft(40.0, (1e-4, 0.05)) == 0.0
