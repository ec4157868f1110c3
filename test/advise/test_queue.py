"""Waits of prompts in a queue, against theory and against an event-driven simulation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from canopy_lab.advise.queue import log_arrivals, servers_for, waits_s


def by_events(arrivals, service, servers):
    """Return the waits from a slow, simple search for the first free server."""
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
def test_enough_servers_are_assumed_to_stay_below_seventy_percent(busy: float, want: int) -> None:
    assert servers_for(busy) == want


def of_log(times, service, servers, one_in, most=10**9):
    """Mean wait of a log whose services are known for one in ``one_in`` of its requests only."""
    kept = np.random.default_rng(5).random(len(times)) < 1 / one_in
    log = log_arrivals(times[kept], times, most=most)
    waits = waits_s(log.times_s, service[kept][log.of], servers, log.stands_for)
    return waits[log.measured].mean()


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(("most", "within"), [(10**9, 0.15), (20_000, 0.3)])
def test_a_sample_waits_as_long_as_its_log_if_the_load_varies(servers, most, within) -> None:
    """Ten busy minutes at 130 % of the servers, ten quiet ones at 10 %.

    Slices see some of these minutes only.
    """
    draw, times, now = np.random.default_rng(1), [], 0.0
    while now < 8 * 3600:
        busy = now // 600 % 2 == 0
        now += draw.exponential(0.3 / servers / (1.3 if busy else 0.1))
        times.append(now)
    arrivals, service = np.array(times), draw.exponential(0.3, len(times))
    whole = waits_s(arrivals, service, servers).mean()
    assert whole > 50
    for one_in in (2, 4, 16):
        assert of_log(arrivals, service, servers, one_in, most) == pytest.approx(whole, rel=within)


@pytest.mark.parametrize("most", [10**9, 50_000])
def test_a_sample_waits_as_long_as_its_log_if_the_load_is_even(most) -> None:
    draw = np.random.default_rng(2)
    arrivals = np.cumsum(draw.exponential(0.3 / 0.7, 100_000))
    service = draw.exponential(0.3, len(arrivals))
    whole = waits_s(arrivals, service, 1).mean()
    for one_in in (2, 16):
        assert of_log(arrivals, service, 1, one_in, most) == pytest.approx(whole, rel=0.25)
