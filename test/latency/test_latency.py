"""Reports of latency, targets on them, and the loads that meet them."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from canopy_lab.latency.latency_report import latency_report
from canopy_lab.latency.saturation import saturation
from canopy_lab.latency.slo import parse_slo
from sglang_canopy.errors import CanopyError


def make_report(ttft_s, *, due_s=None, end_s=None, prompt_tokens=None, sessions=None, **options):
    due_s = list(range(len(ttft_s))) if due_s is None else due_s
    end_s = np.add(due_s, ttft_s).tolist() if end_s is None else end_s
    prompt_tokens = [100] * len(ttft_s) if prompt_tokens is None else prompt_tokens
    sessions = list(range(len(ttft_s))) if sessions is None else sessions
    return latency_report(due_s, ttft_s, end_s, prompt_tokens, sessions, **options)


def test_the_warm_up_is_excluded_by_due_time():
    latencies = make_report([9.0, 1.0, 1.0, 3.0, 9.0], due_s=[0, 3, 2, 1.5, 1], warm_up_share=0.4)
    assert latencies.requests == 3
    assert latencies.ttft_s.mean == pytest.approx(5 / 3)
    assert latencies.ttft_s.max == 3.0


def test_deciles_are_by_the_length_of_prompts():
    ttft_s = [float(i % 10) for i in range(100)]
    prompt_tokens = [(i % 10) * 50 for i in range(100)]
    latencies = make_report(ttft_s, prompt_tokens=prompt_tokens, warm_up_share=0.0)
    assert [decile.requests for decile in latencies.deciles] == [10] * 10
    assert [decile.ttft_s.mean for decile in latencies.deciles] == [float(i) for i in range(10)]
    assert [decile.longest_tokens for decile in latencies.deciles] == [i * 50 for i in range(10)]


def test_a_session_lasts_from_its_first_request_to_its_last_answer():
    latencies = make_report(
        [1.0, 1.0, 1.0], due_s=[0, 10, 4], end_s=[2, 30, 5], sessions=["a", "a", "b"],
        warm_up_share=0.0,
    )  # fmt: skip
    assert latencies.sessions == 2
    assert latencies.sessions_per_hour == pytest.approx(2 * 3600 / 30)
    assert latencies.session_s.max == 30
    assert latencies.session_s.p50 == pytest.approx((30 + 1) / 2)


@given(load=st.floats(0.3, 3.0), seed=st.integers(0, 50))
def test_growth_is_the_rate_at_which_a_single_server_falls_behind(load, seed):
    # A queue of one server, by Lindley's recursion: arrivals `load` times as fast as it serves.
    rng, now_s, server_free_s, due_s, waits_s = random.Random(seed), 0.0, 0.0, [], []
    for _ in range(4000):
        now_s += rng.expovariate(load)
        server_free_s = max(server_free_s, now_s) + 1.0
        due_s.append(now_s)
        waits_s.append(server_free_s - now_s)
    growth = make_report(waits_s, due_s=due_s).growth
    if load < 0.9:
        assert growth < 0.02
    elif load > 1.1:
        assert growth == pytest.approx(load - 1, rel=0.25, abs=0.03)


def test_the_saturation_of_a_single_server_is_its_rate():
    def growth_at(rate: float) -> float:
        server_free_s, waits_s = 0.0, []
        due_s = np.arange(3000) / rate
        for arrival_s in due_s:
            server_free_s = max(server_free_s, arrival_s) + 0.25
            waits_s.append(server_free_s - arrival_s)
        return make_report(waits_s, due_s=due_s).growth

    for guess_per_s in (0.1, 4.0, 90.0):
        assert saturation(growth_at, guess_per_s) == pytest.approx(4.0 * 1.01, rel=0.02)


def test_a_system_without_a_saturation_is_refused():
    with pytest.raises(CanopyError, match="no saturation"):
        saturation(lambda rate: 0.0, 1.0)
    with pytest.raises(CanopyError, match="the queue grows even at"):
        saturation(lambda rate: 1.0, 1.0)


@given(
    statistic=st.sampled_from(["mean", "p50", "p95", "p99", "max"]),
    metric=st.sampled_from(["ttft", "session"]),
    amount=st.floats(0.1, 900),
    unit=st.sampled_from(["ms", "s", "min", "h"]),
)
def test_a_target_is_read_as_it_is_written(statistic, metric, amount, unit):
    latencies = make_report([1.0, 2.0, 50.0, 4.0], warm_up_share=0.0)
    seconds = round(amount, 3) * {"ms": 1e-3, "s": 1, "min": 60, "h": 3600}[unit]
    actual = dataclasses.asdict(latencies)[f"{metric}_s"][statistic]
    slo = parse_slo(f"{statistic}_{metric} < {round(amount, 3)}{unit}")
    assert slo.is_met(latencies) == (actual < seconds)


def test_several_targets_must_all_be_met():
    latencies = make_report([1.0, 2.0, 3.0], warm_up_share=0.0)
    assert parse_slo("mean_ttft<3s,max_ttft<4s").is_met(latencies)
    assert not parse_slo("mean_ttft<3s,max_ttft<2s").is_met(latencies)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("p99_ttft", "written like p99_ttft<2s"),
        ("p98_ttft<2s", "statistic must be one of mean, p50"),
        ("p99_tpot<2s", "metric must be one of ttft, session"),
        ("p99_ttft<2", "unit must be one of ms, s, min, h"),
        ("p99_ttft<0s", "must be above 0"),
        ("p99_ttft>2s", "written like"),
        ("", "written like"),
    ],
)
def test_a_target_that_cannot_be_read_is_refused(text, message):
    with pytest.raises(CanopyError, match=message):
        parse_slo(text)


@pytest.mark.parametrize("share", [-0.1, 1.0, 2.0])
def test_a_report_without_requests_is_refused(share):
    with pytest.raises(CanopyError, match="warm-up"):
        make_report([1.0], warm_up_share=share)
    with pytest.raises(CanopyError, match="no request was answered"):
        make_report([])
