"""Which part of a log a plan is made from, and when a new plan is news."""

import pytest

from canopy_lab.plan.space import Configuration
from canopy_lab.plan.watch import WEEK_S, Slot, changed, cut
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError


def log(*hours):
    return [TraceRequest(h * 3600, 10, 1, (1,), 16, line=i) for i, h in enumerate(hours)]


def test_the_last_hours_end_at_the_last_request():
    chosen = cut(log(0, 5, 8.5, 9, 10), Slot(2))
    assert [r.line for r in chosen] == [2, 3, 4]
    assert [r.time_s for r in chosen] == [0, 1800, 5400]


def test_the_same_slot_last_week_is_what_came_next_a_week_ago():
    week = WEEK_S / 3600
    chosen = cut(log(0, 9.9, 10, 11, 12.5, week, week + 10), Slot(2, last_week=True))
    assert [r.line for r in chosen] == [2, 3]


def test_a_log_shorter_than_a_week_says_what_it_has():
    with pytest.raises(CanopyError, match=r"spans 30.0 h; use --last-hours"):
        cut(log(0, 10, 30), Slot(2, last_week=True))
    with pytest.raises(CanopyError, match="no finished request yet"):
        cut([], Slot(1))


def test_only_a_slot_of_a_log_is_kept_in_memory():
    long = log(*(i / 100 for i in range(30_000)))
    assert len(cut(iter(long), Slot(1))) == 101


@pytest.mark.parametrize("hours", [0, -1, 200, float("nan")])
def test_a_slot_must_be_hours_of_a_week(hours):
    with pytest.raises(CanopyError, match="at most 168 hours"):
        Slot(hours)


def test_a_plan_is_news_when_it_differs_and_matters():
    def row(dram, cost, ttft):
        return {**Configuration(dram_gib=dram).to_json(), "cost": cost, "mean_ttft_s": ttft}

    running = Configuration(dram_gib=64)
    assert changed(None, row(64, 1, 1), 0.02, None)
    assert not changed(running, row(64, 2, 2), 0.02, row(64, 1, 1))
    assert not changed(running, row(128, 1.01, 0.99), 0.02, row(64, 1, 1))
    assert changed(running, row(128, 1.01, 0.5), 0.02, row(64, 1, 1))
