"""A plan prints calibrations of the result file, whose method is the planner's."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from canopy_lab.plan.calibration import CALIBRATIONS, calibration_text
from canopy_lab.plan.choice import parse_constraint
from canopy_lab.plan.text import uncertainty_text
from canopy_lab.plan.uncertainty import CALIBRATED, SHIFT, SLOPE, uncertainty_of

RESULTS = Path(__file__).resolve().parents[2] / "benchmark/plan/results/confidence.json"


@pytest.mark.parametrize("row", CALIBRATIONS, ids=lambda row: row.metric)
def test_a_row_is_that_of_the_result_file(row) -> None:
    found = [
        one
        for one in json.loads(RESULTS.read_text())
        if (one["role"], one["metric"], one["method"])
        == ("judged", row.metric, "probit of the distance")
    ]
    plans, sure = (sum(one[key] for one in found) for key in ("plans", "sure"))
    assert plans == row.plans
    for key, count in (("stated", "plans"), ("held", "plans"), ("sure_held", "sure")):
        mean = sum(one[count] * (one[key] or 0) for one in found) / (
            sure if count == "sure" else plans
        )
        assert getattr(row, key) == pytest.approx(mean, abs=0.006), key


def test_calibrated_metrics_held_as_often_as_stated() -> None:
    held = {
        row.metric + "_s" for row in CALIBRATIONS if row.held > row.stated and row.sure_held > 0.9
    }
    assert set(CALIBRATED) == held


@pytest.mark.parametrize("limit", ["p99_ttft<30s", "mean_ttft<30s"])
def test_a_limit_on_p99_has_no_confidence(limit) -> None:
    ttft = np.random.default_rng(0).lognormal(0, 1, 500)
    result = SimpleNamespace(
        requests=500, ttft_s=ttft, e2e_s=ttft, due_s=np.arange(500.0),
        cached_tokens=np.full(500, 30), prompt_tokens=np.full(500, 100),
    )  # fmt: skip
    text = "\n".join(uncertainty_text(uncertainty_of(result, [parse_constraint(limit)])))
    assert ("none, not calibrated for p99_ttft<30s" in text) == limit.startswith("p99")


def test_confidence_is_calibrated_rather_than_the_share_of_draws() -> None:
    ttft = np.random.default_rng(0).lognormal(0, 1, 2000)
    result = SimpleNamespace(
        requests=2000, ttft_s=ttft, e2e_s=ttft, due_s=np.arange(2000.0),
        cached_tokens=np.full(2000, 30), prompt_tokens=np.full(2000, 100),
    )  # fmt: skip
    low = ttft.mean() * 0.9
    stated = [
        uncertainty_of(result, [parse_constraint(f"mean_ttft<{limit:.4f}s")]).met
        for limit in (low, ttft.mean(), ttft.mean() * 1.1, ttft.mean() * 2)
    ]
    assert stated == sorted(stated)
    assert 0.5 < stated[1] < 0.6
    assert stated[-1] > 0.97
    assert (SLOPE, SHIFT) == (0.5, 0.15)


def test_the_plan_prints_the_limits_of_its_confidence() -> None:
    assert calibration_text()[-1].lstrip().startswith("not covered: a change of the traffic")
