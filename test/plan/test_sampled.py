"""A search on a part of a trace: the choice against that of simulating everything on the whole."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic.presets import get_preset
from synthetic.trace import synthesise

from canopy_lab.plan.choice import choose, parse_constraints
from canopy_lab.plan.confirm import confirm
from canopy_lab.plan.evaluate import Evaluator
from canopy_lab.plan.objective import METRICS, PlanRow
from canopy_lab.plan.planner import footprint_gib_of as footprint_of
from canopy_lab.plan.planner import make_plan, make_space, min_tier_gib
from canopy_lab.plan.prices import load_prices
from canopy_lab.plan.request import PlanRequest
from canopy_lab.plan.sampled import busiest_window
from canopy_lab.plan.space import Configuration
from canopy_lab.plan.system import Engine
from canopy_lab.plan.worker import PlanInputs
from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.system import load_profile
from canopy_lab.trace.record import TraceRequest

PROFILE = load_profile("qwen2.5-7b-h100")
BLOCK_TOKENS = 64


def request_of(time_s, blocks, output_tokens=32, input_tokens=None):
    return TraceRequest(
        time_s=time_s,
        input_tokens=len(blocks) * BLOCK_TOKENS if input_tokens is None else input_tokens,
        output_tokens=output_tokens,
        blocks=tuple(blocks),
        block_tokens=BLOCK_TOKENS,
    )


def chat_trace(preset, rate, requests=220, seed=1):
    """Return the first ``requests`` requests of a synthetic preset at ``rate`` requests per second."""
    synthetic = synthesise(get_preset(preset).at_rate(rate), 20 * requests / rate, seed=seed)
    return CompactTrace(drawn.request for drawn, _ in zip(synthetic, range(requests)))


def agents_trace(turns=14, conversations=12, rate=1.5):
    """Conversations that grow and return after others."""
    rng, trace, time_s = random.Random(3), [], 0.0
    for turn in range(turns):
        for i in range(conversations):
            time_s += rng.expovariate(rate)
            trace.append(request_of(time_s, range(10_000 * i, 10_000 * i + 60 * (turn + 1)), 60))
    return CompactTrace(trace)


def documents_trace(count=200):
    """Return requests for a few popular documents, and for many that are used once."""
    rng, trace, time_s = random.Random(4), [], 0.0
    for i in range(count):
        time_s += rng.expovariate(2.5)
        document = rng.randrange(12) if rng.random() < 0.6 else 100 + i
        blocks = [*range(1000 * document, 1000 * document + 150), 10**7 + i]
        trace.append(request_of(time_s, blocks, 40))
    return CompactTrace(trace)


WORKLOADS = {
    "chat": (lambda: chat_trace("trace-a", 14.0), 20_000, 1),
    "api": (lambda: chat_trace("trace-b", 40.0), 15_000, 1),
    "agents": (agents_trace, 80_000, 1),
    "documents": (documents_trace, 40_000, 1),
    "two instances": (lambda: chat_trace("trace-a", 30.0), 15_000, 2),
}


@pytest.mark.parametrize(
    "name",
    [
        "documents",
        "two instances",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("chat", "api", "agents")),
    ],
)
def test_the_choice_is_that_of_simulating_everything(name):
    make_trace, device_tokens, instances = WORKLOADS[name]
    engine = Engine(PROFILE, device_tokens, "prefix-aware")
    full_inputs = PlanInputs(make_trace(), engine, load_prices("aws-us-east-1"))
    request = PlanRequest(
        disks=("gp3",), instances=(instances,), dram_levels=4,
        disk_levels=2, choices={"page_size": (64,), "prefetch_policy": ("timeout", "wait_complete")},
    )  # fmt: skip
    space = make_space(
        request, footprint_of(full_inputs.trace, full_inputs.engine), full_inputs.prices,
        min_tier_gib(full_inputs.trace, full_inputs.engine),
    )  # fmt: skip
    grid = space.grid()
    window = busiest_window(full_inputs.trace, len(full_inputs.trace) // 3)
    part_inputs = full_inputs.with_trace(window)
    with Evaluator(full_inputs) as evaluate, Evaluator(part_inputs) as evaluate_part:
        exact = dict(zip(grid, evaluate(grid)))
        predicted_rows = dict(zip(grid, evaluate_part(grid)))
    p99 = sorted(row["p99_ttft_s"] for row in exact.values())
    goals = [
        *(((f"p99_ttft<{p99[len(p99) * q // 100] * 1.0001}s",), "cost") for q in (5, 30, 60, 90)),
        ((), "mean_ttft"),
        ((f"mean_ttft<{np.median([row['mean_ttft_s'] for row in exact.values()])}s",), "cost"),
    ]
    for constraints, minimise in goals:
        limits, metric = parse_constraints(constraints), METRICS[minimise]
        confirmed = confirm(predicted_rows, lambda cs: [exact[each] for each in cs], limits, metric)
        best = choose(list(exact.values()), limits, metric)
        # Differences of under a thousandth are called none (choice.py).
        chosen_value, best_value = (row[metric.key] for row in (confirmed.choice.row, best.row))
        assert chosen_value == pytest.approx(best_value, rel=1e-3), (constraints, minimise)
        assert confirmed.choice.is_feasible == best.is_feasible
        assert confirmed.choice.row is exact[confirmed.choice.row.configuration]  # not predicted


SIZES = [Configuration(dram_gib=float(dram_gib)) for dram_gib in (0, *range(8, 200, 4))]


@given(st.floats(0.2, 5.0), st.floats(-0.15, 0.15), st.integers(0, len(SIZES) - 1))
def test_a_prediction_with_an_error_within_the_margins_loses_no_choice(factor, tilt, limit_index):
    """The error is a factor that changes with the size within the margins."""

    def row(configuration, factor=1.0):
        ttft_s = 0.5 + 4 * math.exp(-configuration.dram_gib / 60)
        return PlanRow(configuration, {"mean_ttft_s": ttft_s * factor, "p99_ttft_s": 3 * ttft_s * factor,
                             "cost": 1 + 0.01 * configuration.dram_gib})  # fmt: skip

    def simulate(configuration):
        return row(configuration, factor * math.exp(tilt * math.log2(1 + configuration.dram_gib)))

    exact_rows = {c: simulate(c) for c in SIZES}
    limit_s = exact_rows[SIZES[limit_index]]["p99_ttft_s"] * 1.0001
    limits = parse_constraints([f"p99_ttft<{limit_s}s"])
    confirmed = confirm(
        {c: row(c) for c in SIZES}, lambda cs: [exact_rows[c] for c in cs], limits, METRICS["cost"]
    )
    best = choose(list(exact_rows.values()), limits, METRICS["cost"])
    assert confirmed.choice.row.configuration == best.row.configuration


def small_plan(trace=None, **options):
    engine = Engine(PROFILE, 30_000, "prefix-aware")
    inputs = PlanInputs(trace or agents_trace(4, 6, 0.3), engine, load_prices("aws-us-east-1"))
    request = PlanRequest(
        disks=("gp3",), choices={"page_size": (64,)}, dram_levels=6, disk_levels=3,
        minimise=METRICS["cost_per_hour"], checks="off", **options,
    )  # fmt: skip
    return make_plan(request, inputs)


@pytest.mark.parametrize("sample_requests", [0, 8])
def test_no_row_of_a_plan_has_more_host_memory_than_can_be_reused(sample_requests):
    plan = small_plan(sample_requests=sample_requests, dram_gib=200.0, instances=(1, 2))
    rows = [*plan.result.rows.values(), plan.choice.row]
    host_gib = {each.instances * each.dram_gib for each in (row.configuration for row in rows)}
    assert 0 < max(host_gib) <= plan.reusable_gib * (1 + 1e-9) < plan.footprint_gib


def test_a_trace_that_repeats_nothing_needs_no_host_memory():
    plan = small_plan(CompactTrace(request_of(i, [i]) for i in range(5)))
    assert {plan_row.configuration.dram_gib for plan_row in plan.result.rows.values()} == {0.0}
    assert plan.reusable_gib == plan.baseline.configuration.dram_gib == 0.0


def test_a_plan_from_a_part_marks_rows_not_simulated_on_the_whole():
    plan = small_plan(sample_requests=8)
    assert plan.predicted > 0
    assert not plan.choice.row.predicted
    assert plan.choice.row["requests"] == 24
    predicted_rows = [plan_row for plan_row in plan.result.rows.values() if plan_row.predicted]
    assert {plan_row["requests"] for plan_row in predicted_rows} == {8}


@pytest.mark.parametrize("sample_requests", [0, 12, 8_000])
def test_a_short_trace_is_simulated_whole(sample_requests):
    assert small_plan(sample_requests=sample_requests).predicted == 0


def test_the_busiest_part_is_consecutive_and_its_times_begin_at_zero():
    trace = CompactTrace(request_of(time_s, [time_s]) for time_s in (0, 10, 20, 30, 31, 32, 50, 60))
    part = busiest_window(trace, 3)
    assert [request.time_s for request in part] == [0, 1, 2]
    assert [request.blocks for request in part] == [(30,), (31,), (32,)]
    assert busiest_window(trace, 9) is trace
