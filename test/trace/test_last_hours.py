"""The part of a server's log that a plan uses."""

import pytest

from canopy_lab.trace.open import last_hours
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError


def log(*hours):
    return [TraceRequest(h * 3600, 10, 1, (1,), 16, line=i) for i, h in enumerate(hours)]


def test_the_last_hours_end_at_the_last_request():
    chosen = last_hours(log(0, 5, 8.5, 9, 10), 2)
    assert [r.line for r in chosen] == [2, 3, 4]
    assert [r.time_s for r in chosen] == [0, 1800, 5400]


def test_a_log_without_requests_is_refused_with_the_reason():
    with pytest.raises(CanopyError, match="no finished request yet"):
        last_hours([], 1)


def test_only_those_hours_are_kept():
    long = log(*(i / 100 for i in range(30_000)))
    assert len(last_hours(iter(long), 1)) == 101


@pytest.mark.parametrize("hours", [0, -1, 200, float("nan")])
def test_they_must_be_hours_of_a_week(hours):
    with pytest.raises(CanopyError, match="at most 168"):
        last_hours(log(1), hours)
