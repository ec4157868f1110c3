"""Stated confidence of a plan, against other draws of the same traffic."""

from types import SimpleNamespace

import numpy as np
import pytest
from test_choice import row

from canopy_lab.plan import planner
from canopy_lab.plan.choice import choose, parse_constraints
from canopy_lab.plan.objective import METRICS
from canopy_lab.plan.uncertainty import WINDOWS, conversations_of, uncertainty_of


def result(ttft):
    """A simulation in which requests had these TTFTs, in order of arrival."""
    ttft = np.asarray(ttft, dtype=float)
    count = len(ttft)
    return SimpleNamespace(
        requests=count, ttft_s=ttft, e2e_s=2 * ttft, due_s=np.arange(count, dtype=float),
        cached_tokens=np.full(count, 30), prompt_tokens=np.full(count, 100),
    )  # fmt: skip


def bursty(seed, count=4000, burst=100):
    """TTFTs that are slow in bursts, each with a level of its own."""
    draw = np.random.default_rng(seed)
    levels = draw.exponential(1.0, size=count // burst)
    return np.repeat(levels, burst) * draw.uniform(0.8, 1.2, size=count)


def test_identical_requests_leave_no_uncertainty():
    found = uncertainty_of(result([1.5] * 500), parse_constraints(["p99_ttft<2s"]))
    assert found.intervals["p99_ttft_s"] == (1.5, 1.5)
    assert found.met == 1.0
    assert found.windows["mean_ttft_s"] == (1.5,) * WINDOWS
    assert found.intervals["token_hit_ratio"] == pytest.approx((0.3, 0.3))
    assert uncertainty_of(result([1.5] * 500), parse_constraints(["p99_ttft<1s"])).met == 0.0


def test_most_intervals_of_the_mean_contain_the_true_mean():
    held = 0
    for seed in range(15):
        low, high = uncertainty_of(result(bursty(seed))).intervals["mean_ttft_s"]
        held += low <= 1.0 <= high
    # 90 % at best; with 40 bursts a trace, bootstrap intervals are a little short.
    assert held >= 11
    # Were requests drawn one by one, the bursts would be lost and the intervals far too short.
    ttft = bursty(0)
    low, high = uncertainty_of(result(ttft)).intervals["mean_ttft_s"]
    alone = uncertainty_of(result(np.random.default_rng(0).permutation(ttft)))
    short = alone.intervals["mean_ttft_s"]
    assert high - low > 3 * (short[1] - short[0])


def test_a_limit_at_the_middle_is_met_about_half_of_the_time():
    ttft = bursty(3)
    limit = parse_constraints([f"mean_ttft<{ttft.mean():.6f}s"])
    assert 0.3 < uncertainty_of(result(ttft), limit).met < 0.7


def test_limits_of_the_whole_run_are_reported_as_excluded():
    found = uncertainty_of(result([1.0] * 50), parse_constraints(["cost<5", "p90_ttft<2s"]))
    assert found.left_out == ("cost<5",)
    assert found.met == 1.0
    assert uncertainty_of(result([1.0] * 50), parse_constraints(["cost<5"])).met is None


def test_equal_results_give_equal_answers():
    one, two = (uncertainty_of(result(bursty(1))) for _ in range(2))
    assert one == two


def test_candidates_for_a_sure_choice_are_not_all_one_configuration(monkeypatch):
    """A dozen of small settings cost less than the next size, and are as unsure as the cheapest."""
    limits = parse_constraints(["p99_ttft<20s"])
    rows = [row(dram, 1.0, 1000.0, 4.0 + dram / 100, p99=19.0) for dram in range(20)]
    rows.append(row(64, 1.0, 1000.0, 9.0, p99=12.0))
    monkeypatch.setattr(
        planner, "uncertainty_of", lambda p99, *_: SimpleNamespace(met=float(p99 < 15))
    )
    evaluate = SimpleNamespace(
        result=lambda c: 12.0 if c.dram_gib == 64 else 19.0, conversations=lambda: None
    )
    request = planner.PlanRequest(constraints=limits)
    choice = choose(rows, limits, METRICS["cost"])
    best, sure, unsure = planner._sure(choice, rows, request, evaluate)
    assert (best.row["dram_gib"], sure.met) == (64, 1.0)
    assert [one.row["dram_gib"] for one in unsure] == [0]


def test_turns_of_one_conversation_are_not_separate_evidence():
    """A few slow conversations with many turns decide the P99: a log without them is likely."""
    draw = np.random.default_rng(1)
    slow = draw.choice(400, 5, replace=False)
    numbers = np.concatenate([np.arange(3600) % 360 + 1000, np.repeat(slow, 80)])
    ttft = np.concatenate([np.full(3600, 1.0), np.full(400, 5.0)])
    order = draw.permutation(4000)
    limit = parse_constraints(["mean_ttft<1.5s"])
    apart = uncertainty_of(result(ttft[order]), limit)
    together = uncertainty_of(result(ttft[order]), limit, numbers[order])
    assert apart.met > 0.9
    assert together.met < 0.9
    assert together.conversations == 365


def test_conversations_are_known_by_name_or_by_the_links_of_their_turns():
    def request(name):
        return SimpleNamespace(user=None, conversation=name)

    trace = [request(name) for name in ("a", "b", "a", None, None)]
    assert conversations_of(trace, [-1, -1, -1, 4, -1]).tolist() == [0, 1, 0, 3, 3]


def test_a_long_trace_is_resampled_by_days():
    of = result([1.5] * 700)
    of.due_s = np.linspace(0, 7 * 86400 - 1, 700)
    assert uncertainty_of(of).periods == "7 days"
    assert uncertainty_of(result([1.5] * 700)).periods == "40 parts"


def test_a_fresh_trace_differs_more_than_one_resample_does():
    """A limit one standard error above the mean: five in six of one resample meet it, three in four of
    fresh logs. The confidence allows for the choice, too."""
    ttft = np.random.default_rng(2).exponential(1.0, 4000)
    error = ttft.std() / len(ttft) ** 0.5
    limit = parse_constraints([f"mean_ttft<{ttft.mean() + error:.6f}s"])
    assert 0.6 < uncertainty_of(result(ttft), limit).met < 0.75
