"""Two real servers in turns: due times, bootstrap draws, and the result."""

import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canopy_lab.trace import TraceRequest
from canopy_lab.trace.materialise import PlannedJob
from latency import paired, slices


def planned_of(times_s: list[float], prompt_tokens: list[int] | None = None) -> list[PlannedJob]:
    prompt_tokens = prompt_tokens or [10] * len(times_s)
    return [
        PlannedJob(TraceRequest(time_s, tokens, 1, (), 1), i, tokens, 1, None)
        for i, (time_s, tokens) in enumerate(zip(times_s, prompt_tokens, strict=True))
    ]


@given(st.lists(st.integers(1, 9_000), min_size=3, max_size=80), st.integers(1, 20))
def test_slices_have_about_as_many_prompt_tokens_each(prompt_tokens: list[int], count: int) -> None:
    count = min(count, len(prompt_tokens))
    planned = planned_of([float(i) for i in range(len(prompt_tokens))], prompt_tokens)
    cut = slices.cut_evenly(planned, count)
    assert [job for each in cut for job in each] == planned
    assert len(cut) == count
    assert all(cut)
    if count > 1 and len(prompt_tokens) >= 40 * count:  # no slice is short because of the others
        mean, longest = sum(prompt_tokens) / count, max(prompt_tokens)
        assert all(abs(sum(job.prompt_tokens for job in each) - mean) <= longest for each in cut)


def test_requests_of_the_last_time_stamp_are_spread() -> None:
    due_s = slices.due_times(planned_of([0, 0, 3, 3, 6, 6]), rate_per_s=2.0, seed=0)
    assert due_s == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0, 2.5])


def test_the_gaps_are_those_of_the_trace() -> None:
    due_s = slices.due_times(planned_of([0.0, 1.0, 4.0, 5.0]), rate_per_s=1.0, seed=0)
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(due_s)]
    assert gaps_s[1] == pytest.approx(3 * gaps_s[0])
    assert gaps_s[2] == pytest.approx(gaps_s[0])


def test_requests_of_one_stamp_arrive_as_a_poisson_process() -> None:
    due_s = slices.due_times(planned_of([7.0] * 400), rate_per_s=4.0, seed=3)
    assert len(set(due_s)) == 400
    assert due_s[-1] == pytest.approx(100.0, rel=0.15)
    assert due_s == slices.due_times(planned_of([7.0] * 400), rate_per_s=4.0, seed=3)
    assert due_s != slices.due_times(planned_of([7.0] * 400), rate_per_s=4.0, seed=4)


@given(st.lists(st.integers(0, 20), min_size=2, max_size=40).map(sorted), st.floats(0.1, 50.0))
def test_due_times_ascend_from_the_start_at_the_rate(times_s: list[int], rate: float) -> None:
    due_s = slices.due_times(
        planned_of([3.0 * time_s for time_s in times_s]), rate_per_s=rate, seed=0
    )
    assert len(due_s) == len(times_s)
    assert due_s == sorted(due_s)
    assert due_s[0] >= 0.0
    if times_s[0] != times_s[-1]:
        assert due_s[0] == 0.0
        assert len(due_s) / rate >= due_s[-1]


def test_a_load_is_a_share_of_the_tokens_a_second_and_not_of_the_requests() -> None:
    """Two slices of short and long prompts have the requested load on average."""
    cut = [planned_of([0, 1], [10, 30]), planned_of([2, 3], [100, 60])]
    assert slices.rate_of(cut, load=0.5, tokens_per_s=200.0) == pytest.approx(2.0)


def request_rows(*ttft: float, cached: int = 0) -> list[dict[str, Any]]:
    hit = {"cached_tokens": cached}
    return [{"ttft_s": ttft_s, "done_s": ttft_s + 1, "prompt_tokens": 10, **hit} for ttft_s in ttft]


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "BOOTSTRAP_SAMPLES", 100)


@pytest.mark.usefixtures("few_draws")
def test_intervals_compare_slice_by_slice() -> None:
    """Slices differ a hundredfold, the arms by exactly a tenth: the interval has no width."""
    base_slices = [request_rows(ttft_s, 2 * ttft_s) for ttft_s in (0.1, 1.0, 10.0)]
    changed_slices = [request_rows(0.9 * ttft_s, 1.8 * ttft_s) for ttft_s in (0.1, 1.0, 10.0)]
    value, low, high = paired.compare(base_slices, changed_slices, seed=1)["mean"]
    assert (value, low, high) == pytest.approx((-0.1, -0.1, -0.1))


def test_the_interval_is_that_of_a_mean_of_slices() -> None:
    """The expected width is the normal approximation's: 40 slices of one request each."""
    rng = random.Random(5)
    base_slices = [request_rows(1.0) for _ in range(40)]
    changes = [rng.gauss(0.0, 0.2) for _ in range(40)]
    changed_slices = [request_rows(1.0 + change) for change in changes]
    value, low, high = paired.compare(base_slices, changed_slices, seed=2)["mean"]
    standard_error = statistics.stdev(changes) / 40**0.5
    assert value == pytest.approx(statistics.fmean(changes))
    assert (high - low) / 2 == pytest.approx(1.96 * standard_error, rel=0.12)


@pytest.mark.usefixtures("few_draws")
def test_hits_differ_in_points() -> None:
    base_slices = [request_rows(1.0, cached=2), request_rows(1.0, cached=2)]
    changed_slices = [request_rows(1.0, cached=5), request_rows(1.0, cached=5)]
    comparison = paired.compare(base_slices, changed_slices, seed=1)
    assert comparison["hits"] == pytest.approx((0.3, 0.3, 0.3))
    assert comparison["max"][0] == 0.0


def test_each_arm_is_first_equally_often() -> None:
    first_arms = [slices.arm_order("abc", i)[0] for i in range(6)]
    assert sorted(first_arms) == list("aabbcc")
    orders = [slices.arm_order("abc", i) for i in range(6)]
    pairs = {pair for order in orders for pair in itertools.pairwise(order)}
    assert len(pairs) == 6, "who comes before whom changes too"


def test_results_are_saved_after_each_load_and_resumed_with_the_same_arguments(tmp_path: Path):
    file, arguments, loads = tmp_path / "result.json", {"arms": {"a": ["--x"]}, "slices": 10}, []
    for load in (0.95, 0.7):
        result = paired.ResultFile(file, arguments)
        assert (result.is_measured(0.95), result.is_measured(0.7)) == (bool(loads), False)
        result.add({"load": load, "figures": {}})
        loads.append(load)
        assert [row["load"] for row in json.loads(file.read_text())["loads"]] == loads
    with pytest.raises(SystemExit, match="other arguments"):
        paired.ResultFile(file, {"arms": 2})
