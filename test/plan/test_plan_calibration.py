"""A plan prints calibrations of the result file."""

import json
from pathlib import Path
from statistics import mean

import pytest

from canopy_lab.plan.calibration import CALIBRATIONS, calibration_of, calibration_text

RESULTS = Path(__file__).resolve().parents[2] / "benchmark/plan/results/confidence.json"


@pytest.mark.parametrize("row", CALIBRATIONS, ids=lambda row: str(row.conversations))
def test_a_row_is_that_of_the_result_file(row) -> None:
    found = [
        one
        for one in json.loads(RESULTS.read_text())
        if one["conversations"] == row.conversations and one["method"].startswith("periods")
    ]
    held = [one["held"] for one in found]
    assert len(found) == row.plans
    assert row.stated == pytest.approx(mean(one["said"] for one in found), abs=0.005)
    assert row.held == pytest.approx(mean(held), abs=0.005)
    assert row.worst == pytest.approx(min(held), abs=0.005)


def test_a_log_takes_the_row_of_its_size() -> None:
    assert [calibration_of(n).conversations for n in (3, 120, 499, 500, 9000)] == [120, 120, 120, 500, 500]  # fmt: skip


def test_a_small_log_is_warned_of() -> None:
    small, large = calibration_text(130), calibration_text(600)
    assert "stated 78 %, and 59 % of fresh logs" in small[0]
    assert "this log has 130 conversations, so the confidence is too high" in small[-1]
    assert large[-1].lstrip().startswith("not covered: days")
