"""The chosen row of a plan: limits in text, the best row within them, and the extremes of all rows."""

import pytest

from canopy_lab.plan.choice import choose, extremes, gains_over, parse_constraint, parse_constraints
from canopy_lab.plan.objective import METRICS, PlanRow
from canopy_lab.plan.space import Configuration
from sglang_canopy.errors import CanopyError

COST = METRICS["cost"]


def plan_row(dram_gib, ttft_s, tokens_per_s, cost, p99_ttft_s=None, disk=None):
    configuration = Configuration(dram_gib=dram_gib, disk=disk, disk_gib=100.0 if disk else 0.0)
    metrics = {
        "mean_ttft_s": ttft_s,
        "p99_ttft_s": 4 * ttft_s if p99_ttft_s is None else p99_ttft_s,
        "throughput_tokens_per_s": tokens_per_s,
        "cost": cost,
        "cost_per_hour": cost,
        "token_hit_ratio": 0.5,
    }
    return PlanRow(configuration, metrics)


ROWS = [
    plan_row(0, 2.0, 1000.0, 4.0),
    plan_row(64, 1.0, 1200.0, 5.0),
    plan_row(64, 0.8, 1190.0, 5.5, disk="gp3"),
    plan_row(512, 0.5, 1200.5, 9.0),
]


@pytest.mark.parametrize(
    ("text", "key", "limit"),
    [
        ("p99_ttft<2s", "p99_ttft_s", 2.0),
        (" mean_ttft <= 500 ms ", "mean_ttft_s", 0.5),
        ("p90_ttft_s<1.5", "p90_ttft_s", 1.5),
        ("throughput>1.2e4", "throughput_tokens_per_s", 12_000),
        ("throughput>=12k", "throughput_tokens_per_s", 12_000),
        ("token_hit_ratio>60%", "token_hit_ratio", 0.6),
        ("cost_per_hour<12$/h", "cost_per_hour", 12),
    ],
)
def test_a_constraint_is_read_in_its_units(text, key, limit):
    constraint = parse_constraint(text)
    assert constraint.metric.key == key
    assert constraint.limit == pytest.approx(limit)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("p99_tfft<2s", "unknown metric 'p99_tfft'.*did you mean 'p99_ttft'"),
        ("p99_ttft", "not of the form METRIC<VALUE"),
        ("p99_ttft<", "not of the form"),
        ("p99_ttft<2 parsecs", "unit 'parsecs' is not one of 's', 'ms'"),
        ("p99_ttft>2s", "write p99_ttft<2s"),
        ("throughput<5", "write throughput>5"),
        ("p99_ttft<1e", "'1e' is not a number"),
        ("p99_ttft<1e999s", "is not a number"),
    ],
)
def test_a_constraint_with_a_typo_suggests_the_correction(text, message):
    with pytest.raises(CanopyError, match=message) as error:
        parse_constraint(text)
    assert "\n" not in str(error.value)


def test_the_cheapest_that_meets_the_limits_is_chosen():
    limits = parse_constraints(["mean_ttft<1.5s,throughput>1100"])
    choice = choose(ROWS, limits, COST)
    assert choice.is_feasible
    assert choice.row is ROWS[1]
    assert choose(ROWS, (), COST).row is ROWS[0]
    # Within a thousandth of the most throughput, at half the price.
    assert choose(ROWS, (), METRICS["throughput"]).row is ROWS[1]
    assert choose(ROWS, (), METRICS["mean_ttft"]).row is ROWS[3]


def test_if_nothing_meets_the_limits_the_choice_is_the_nearest_point_and_names_the_missed_limit():
    limits = parse_constraints(["mean_ttft<0.4s", "cost<20"])
    choice = choose(ROWS, limits, COST)
    assert not choice.is_feasible
    assert choice.row is ROWS[3]
    assert [limit.text for limit in choice.binding] == ["mean_ttft<0.4s"]


def test_of_limits_that_exclude_each_other_those_the_choice_misses_bind():
    limits = parse_constraints(["mean_ttft<0.6s", "cost<6"])
    choice = choose(ROWS, limits, COST)
    assert not choice.is_feasible
    assert choice.binding
    assert all(not limit.is_met(choice.row) for limit in choice.binding)
    # 0.8 s misses 0.6 s by a third, a cost of 9 misses 6 by a half.
    assert choice.row is ROWS[2]


def test_extremes_take_the_cheapest_of_nearly_equal_ones():
    baseline = plan_row(128, 1.0, 1150.0, 6.0)
    choices = extremes(ROWS, baseline)
    assert choices["most throughput"] is ROWS[1]  # 0.04 % less than the most expensive
    assert choices["least mean TTFT"] is ROWS[3]
    assert choices["least cost"] is ROWS[0]
    assert choices["cheapest as good as fixed"] is ROWS[1]
    gains = gains_over(ROWS[1], baseline)
    assert gains["throughput_gain"] == pytest.approx(1200 / 1150 - 1)
    assert gains["mean_ttft_saved"] == 0
    assert gains["cost_saved"] == pytest.approx(1 / 6)
