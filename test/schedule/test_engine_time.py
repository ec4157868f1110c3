"""The time that ranks agree on without a message: exact for an engine that is as predicted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.schedule.engine_time import EngineTime


def run(arrivals: list[float], steps: list[float], error: float) -> list[tuple[float, float]]:
    """An engine that never idles hears of arrivals between its steps; (real, known) after each."""
    known, real, at, seen = EngineTime(), 0.0, 0, []
    for step in steps:
        real += step
        known.worked(step * error)
        while at < len(arrivals) and arrivals[at] <= real:
            known.arrived(arrivals[at])
            at += 1
        seen.append((real, known.now))
    return seen


STEPS = st.lists(st.floats(0.01, 2.0), min_size=1, max_size=60)


@given(STEPS, st.lists(st.floats(0.0, 60.0), max_size=60))
def test_it_is_the_time_where_steps_take_what_was_predicted(steps, arrivals) -> None:
    for real, known in run(sorted(arrivals), steps, 1.0):
        assert known == pytest.approx(real)


@given(STEPS, st.lists(st.floats(0.0, 60.0), max_size=60), st.floats(0.1, 5.0))
def test_it_is_never_before_the_latest_arrival(steps, arrivals, error) -> None:
    known = EngineTime()
    for number, step in enumerate(steps):
        known.worked(step * error)
        for stamp in arrivals[number : number + 1]:
            known.arrived(stamp)
        assert known.now >= max([0.0, *arrivals[: number + 1]])


@pytest.mark.parametrize("error", [0.3, 3.0])
def test_what_was_predicted_wrongly_does_not_add_up(error: float) -> None:
    draw = random.Random(1)
    steps = [draw.uniform(0.1, 0.5) for _ in range(2_000)]
    arrivals, at = [], 0.0
    while at < sum(steps):
        at += draw.expovariate(2.0)
        arrivals.append(at)
    off = [abs(known - real) for real, known in run(arrivals, steps, error)]
    # Between two arrivals it drifts by up to twice their gap, half a second on average.
    assert max(off[1_000:]) <= max(off[:1_000]) + 5.0
    assert sum(off) / len(off) < 2.0


def test_time_passes_while_nobody_comes() -> None:
    known = EngineTime()
    known.arrived(10.0)
    known.worked(0.5)
    known.worked(0.25)
    assert known.now == 10.75


def test_a_request_that_is_back_changes_nothing() -> None:
    known = EngineTime()
    known.arrived(10.0)
    known.worked(5.0)
    known.worked(1.0)
    known.arrived(10.0)
    known.arrived(9.0)
    assert known.now == 16.0
