"""Quantiles of each minute equal those of its times, and the hour is bounded."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.telemetry.window import TtftHour


@given(st.lists(st.floats(0.001, 600.0), min_size=1, max_size=200))
def test_quantiles_are_within_five_percent(times_s):
    hour = TtftHour(lambda: 1e9)
    for seconds in times_s:
        hour.add(seconds)
    (point,) = hour.points()
    assert point["requests"] == len(times_s)
    assert point["p50_s"] == pytest.approx(statistics.median_low(times_s), rel=0.06)
    p99_s = sorted(times_s)[math.ceil(0.99 * len(times_s)) - 1]
    assert point["p99_s"] == pytest.approx(p99_s, rel=0.06)


def test_old_minutes_leave_the_hour_and_quiet_minutes_are_left_out():
    now_s = [0.0]
    hour = TtftHour(lambda: now_s[0])
    for minute in range(100):
        now_s[0] = 60.0 * minute
        if minute % 2:
            hour.add(0.5)
    points = hour.points()
    assert [point["time_unix_s"] for point in points] == [60.0 * i for i in range(41, 100, 2)]
    now_s[0] = 1e6
    assert hour.points() == []


def test_invalid_times_are_ignored_and_long_ones_counted():
    hour = TtftHour(lambda: 0.0)
    for seconds in (float("nan"), float("inf"), -1.0):
        hour.add(seconds)
    assert hour.points() == []
    hour.add(1e12)
    hour.add(0.0)
    (point,) = hour.points()
    assert point["requests"] == 2
