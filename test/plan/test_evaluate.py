"""Rows from the simulator: each simulated once, and equal in any process."""

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

BLOCK_TOKENS = 256
PROFILE = load_profile("llama-3.1-8b-a100")
KV_BYTES_PER_TOKEN = PROFILE.kv_bytes_per_token


def make_trace(requests=60, time_factor=1.0):
    """Six conversations of growing prompts, taking turns."""
    return CompactTrace(
        TraceRequest(
            time_s=number * 0.5 / time_factor,
            input_tokens=(4 + number // 6) * BLOCK_TOKENS,
            output_tokens=16,
            blocks=tuple(1000 * (number % 6) + block for block in range(4 + number // 6)),
            block_tokens=BLOCK_TOKENS,
            conversation=str(number % 6),
        )
        for number in range(requests)
    )


def plan_inputs(**fields):
    # The device holds about two conversations, so that lower tiers matter.
    engine = Engine(PROFILE, device_tokens=24 * BLOCK_TOKENS)
    return PlanInputs(make_trace(), engine, load_prices("aws-us-east-1"), **fields)


def gib_of(blocks):
    return blocks * BLOCK_TOKENS * KV_BYTES_PER_TOKEN / GIB


WITH_DISK = {"dram_gib": gib_of(16), "disk": "gp3", "disk_mib_s": 1000.0}
CONFIGURATIONS = [
    Configuration(),
    Configuration(dram_gib=gib_of(200)),
    Configuration(**WITH_DISK, disk_gib=gib_of(200)),
    Configuration(**WITH_DISK, disk_gib=gib_of(200), ttl=2.0),
    Configuration(**WITH_DISK, disk_gib=gib_of(100), ttl="group"),
]


def without_time(rows):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def test_a_larger_memory_hits_more_at_the_list_price():
    with Evaluator(plan_inputs()) as evaluate:
        device_only, large_memory = evaluate(CONFIGURATIONS[:2])
    assert large_memory["token_hit_ratio"] > device_only["token_hit_ratio"] + 0.1
    assert large_memory["mean_ttft_s"] < device_only["mean_ttft_s"]
    usd_per_hour = 3.9 + gib_of(200) * 0.0032
    assert large_memory["cost_per_hour"] == pytest.approx(usd_per_hour)
    assert large_memory["cost"] == pytest.approx(usd_per_hour * large_memory["makespan_s"] / 3600)


def test_inputs_are_pickled_without_their_caches():
    empty_inputs, filled_inputs = plan_inputs(), plan_inputs()
    filled_inputs.loaded_workload()
    filled_inputs.group_table(1.0)
    pickled = pickle.dumps(filled_inputs)
    assert len(pickled) < 1.01 * len(pickle.dumps(empty_inputs))
    unpickled = pickle.loads(pickled)
    task = SimulationTask(CONFIGURATIONS[1])
    assert without_time([run_task(unpickled, task)]) == without_time([run_task(empty_inputs, task)])


def test_two_processes_return_the_rows_of_one():
    with Evaluator(plan_inputs()) as serial, Evaluator(plan_inputs(), jobs=2) as parallel:
        assert [row.configuration for row in serial(CONFIGURATIONS)] == CONFIGURATIONS
        metrics = [
            without_time(row.metrics for row in evaluate(CONFIGURATIONS))
            for evaluate in (serial, parallel)
        ]
        assert metrics[0] == metrics[1]


def test_a_configuration_or_an_equal_system_is_simulated_once():
    equal_system = replace(CONFIGURATIONS[2], disk="io2")
    inputs = plan_inputs()
    io2 = replace(inputs.prices.disks["gp3"], name="io2")
    inputs.prices = replace(inputs.prices, disks={**inputs.prices.disks, "io2": io2})
    with Evaluator(inputs) as evaluate:
        (first_row,) = evaluate([CONFIGURATIONS[2]])
        repeated, equal_row = evaluate([CONFIGURATIONS[2], equal_system])
        assert evaluate.simulation_count == 1
        assert (repeated, equal_row["mean_ttft_s"]) == (first_row, first_row["mean_ttft_s"])
        evaluate([CONFIGURATIONS[2]], load=1.2)
        evaluate([replace(CONFIGURATIONS[2], disk_mib_s=100.0)])
        assert evaluate.simulation_count == 3


def test_a_disk_gets_the_bandwidth_that_its_size_buys():
    prices = load_prices("alibaba-essd")
    engine = Engine(PROFILE, 1000)
    configuration = Configuration(dram_gib=1, disk="essd-pl1", disk_gib=100.0)
    system = system_of(configuration, engine, prices, {})
    assert system.disk.read_bytes_per_s == 170 * 2**20
    assert system.disk.capacity_bytes == 100 * GIB
    assert system.disk.shared_channel
