"""Waits of prompts in a queue, against theory and against a simulation that goes by events."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from canopy_lab.advise.queue import servers_for, waits_s


def by_events(arrivals, service, servers):
    """Every server asked in turn who is free first; slow and plain."""
    free, waits = [0.0] * servers, []
    for at, needs in zip(arrivals, service):
        first = min(range(servers), key=free.__getitem__)
        begin = max(at, free[first])
        free[first] = begin + needs
        waits.append(begin - at)
    return waits


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 10)), min_size=1, max_size=60),
    st.integers(1, 4),
)
def test_waits_are_those_of_a_first_come_first_served_queue(rows, servers) -> None:
    arrivals = np.cumsum([gap for gap, _ in rows])
    service = np.array([needs for _, needs in rows])
    assert waits_s(arrivals, service, servers) == pytest.approx(by_events(arrivals, service, servers))  # fmt: skip


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 10), st.floats(0, 1)), min_size=1, max_size=60)
)
def test_less_work_never_waits_longer(rows) -> None:
    arrivals = np.cumsum([gap for gap, _, _ in rows])
    service = np.array([needs for _, needs, _ in rows])
    less = service * np.array([share for _, _, share in rows])
    for servers in (1, 3):
        assert (waits_s(arrivals, less, servers) <= waits_s(arrivals, service, servers) + 1e-9).all()  # fmt: skip


def test_the_mean_wait_is_that_of_queueing_theory() -> None:
    """M/M/1: rho / (mu - lambda); M/D/1: half of it."""
    draw = np.random.default_rng(3)
    arrivals = np.cumsum(draw.exponential(1.0, 200_000))
    random = waits_s(arrivals, draw.exponential(0.7, 200_000), 1).mean()
    fixed = waits_s(arrivals, np.full(200_000, 0.7), 1).mean()
    assert random == pytest.approx(0.7 / (1 / 0.7 - 1), rel=0.06)
    assert fixed == pytest.approx(0.7 / (1 / 0.7 - 1) / 2, rel=0.06)


@pytest.mark.parametrize(("busy", "want"), [(0.0, 1), (0.69, 1), (0.71, 2), (3.4, 5)])
def test_so_many_servers_that_none_is_busier_than_seventy_percent(busy: float, want: int) -> None:
    assert servers_for(busy) == want
