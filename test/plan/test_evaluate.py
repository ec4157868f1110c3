"""Rows from the simulator: each made once, the same wherever they are made."""

import pickle
from dataclasses import replace

import pytest

from canopy_lab.plan.disk_class import GIB
from canopy_lab.plan.evaluate import Evaluator
from canopy_lab.plan.prices import load_prices
from canopy_lab.plan.space import Configuration
from canopy_lab.plan.system import Engine, system_of
from canopy_lab.plan.worker import PlanInputs, SimulationTask, run_task
from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.system.engine_profile import load_profile
from canopy_lab.trace.record import TraceRequest

BLOCK = 256
PROFILE = load_profile("llama-3.1-8b-a100")
BYTES = PROFILE.kv_bytes_per_token


def trace(requests=60, load=1.0):
    """Six conversations of growing prompts, taking turns."""
    return CompactTrace(
        TraceRequest(
            time_s=at * 0.5 / load,
            input_tokens=(4 + at // 6) * BLOCK,
            output_tokens=16,
            blocks=tuple(1000 * (at % 6) + b for b in range(4 + at // 6)),
            block_tokens=BLOCK,
            conversation=str(at % 6),
        )
        for at in range(requests)
    )


def work(**fields):
    # The device holds about two conversations, so that lower tiers matter.
    engine = Engine(PROFILE, device_tokens=24 * BLOCK)
    return PlanInputs(trace(), engine, load_prices("aws-us-east-1"), **fields)


def gib(blocks):
    return blocks * BLOCK * BYTES / GIB


SOME = [
    Configuration(),
    Configuration(dram_gib=gib(200)),
    Configuration(dram_gib=gib(16), disk="gp3", disk_mib_s=1000.0, disk_gib=gib(200)),
    Configuration(dram_gib=gib(16), disk="gp3", disk_mib_s=1000.0, disk_gib=gib(200), ttl=2.0),
    Configuration(dram_gib=gib(16), disk="gp3", disk_mib_s=1000.0, disk_gib=gib(100), ttl="group"),
]


def without_time(rows):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def test_a_larger_memory_hits_more_at_the_list_price():
    with Evaluator(work()) as evaluate:
        none, large = evaluate(SOME[:2])
    assert large["token_hit_ratio"] > none["token_hit_ratio"] + 0.1
    assert large["mean_ttft_s"] < none["mean_ttft_s"]
    hourly = 3.9 + gib(200) * 0.0032
    assert large["cost_per_hour"] == pytest.approx(hourly)
    assert large["cost"] == pytest.approx(hourly * large["makespan_s"] / 3600)


def test_arguments_survive_the_way_to_another_process():
    fresh, used = work(), work()
    used.served()
    used.group_table(1.0)
    sent = pickle.dumps(used)
    assert len(sent) < 1.01 * len(pickle.dumps(fresh))
    again = pickle.loads(sent)
    task = SimulationTask(SOME[1])
    assert without_time([run_task(again, task)]) == without_time([run_task(fresh, task)])


def test_processes_give_the_rows_of_this_one():
    with Evaluator(work()) as here, Evaluator(work(), jobs=2) as there:
        assert [row.configuration for row in here(SOME)] == SOME
        metrics = [without_time(row.metrics for row in of(SOME)) for of in (here, there)]
        assert metrics[0] == metrics[1]


def test_a_configuration_or_an_equal_system_is_simulated_once():
    same = replace(SOME[2], disk="io2")
    inputs = work()
    disk = replace(inputs.prices.disks["gp3"], name="io2")
    inputs.prices = replace(inputs.prices, disks={**inputs.prices.disks, "io2": disk})
    with Evaluator(inputs) as evaluate:
        (before,) = evaluate([SOME[2]])
        again, other = evaluate([SOME[2], same])
        assert evaluate.simulated == 1
        assert (again, other["mean_ttft_s"]) == (before, before["mean_ttft_s"])
        evaluate([SOME[2]], load=1.2)
        evaluate([replace(SOME[2], disk_mib_s=100.0)])
        assert evaluate.simulated == 3


def test_a_disk_gets_the_bandwidth_that_its_size_buys():
    prices = load_prices("alibaba-essd")
    engine = Engine(PROFILE, 1000)
    c = Configuration(dram_gib=1, disk="essd-pl1", disk_gib=100.0)
    config = system_of(c, engine, prices, {})
    assert config.disk.read_bytes_per_s == 170 * 2**20
    assert config.disk.capacity_bytes == 100 * GIB
    assert config.disk.shared_channel
