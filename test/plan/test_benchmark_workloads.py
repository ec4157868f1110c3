"""The planner's benchmarks compare numbers of instances at one offered load."""

import importlib
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import ModuleType

import pytest

from canopy_lab.plan.evaluate import Evaluator
from canopy_lab.plan.space import Configuration

FOLDER = Path(__file__).parents[2] / "benchmark" / "plan"


@pytest.fixture
def workloads(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    sys.modules.pop("workloads", None)
    return importlib.import_module("workloads")


def arguments(workloads: ModuleType, *more: str) -> Namespace:
    parser = ArgumentParser()
    workloads.add_arguments(parser)
    return parser.parse_args(["--data", ".", "--requests", "60", "--workloads", "trace-b", *more])


def times(workloads: ModuleType, args: Namespace, instances: int) -> list[float]:
    (chosen,) = workloads.chosen(args)
    return [r.time_s for r in workloads.work_of(chosen, args, instances).trace]


def test_four_instances_get_the_requests_of_one(workloads: ModuleType) -> None:
    args = arguments(workloads)
    assert times(workloads, args, 4) == times(workloads, args, 1)


def test_load_per_instance_is_a_choice(workloads: ModuleType) -> None:
    args = arguments(workloads, "--load-per-instance")
    assert times(workloads, args, 4) == pytest.approx([t / 4 for t in times(workloads, args, 1)])


def test_a_plan_serves_every_number_of_instances_the_same_requests(workloads: ModuleType) -> None:
    (chosen,) = workloads.chosen(arguments(workloads))
    work = workloads.work_of(chosen, arguments(workloads))
    with Evaluator(work) as evaluate:
        one, four = evaluate([Configuration(1), Configuration(4)])
    # The same trace: both see its last request, and four instances are idle more of the time.
    arrivals_s = work.trace[-1].time_s - work.trace[0].time_s
    for row in (one, four):
        assert row["requests"] == 60
        assert row["makespan_s"] >= arrivals_s
    assert four["busy_share"] < 0.9 * one["busy_share"]
    assert four["mean_queue_s"] <= one["mean_queue_s"]
