"""Rows from the simulator: kept between runs, the same wherever they are made."""

import importlib.util
import os
import pickle
import stat
from dataclasses import replace

import pytest

from canopy_lab.plan.cache import Cache, trace_digest
from canopy_lab.plan.evaluate import Evaluator
from canopy_lab.plan.prices import GIB, load_prices
from canopy_lab.plan.space import Configuration
from canopy_lab.plan.system import Engine, system_of
from canopy_lab.plan.worker import PlanInputs, SimulationTask, run_task
from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.system.engine_profile import load_profile
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError

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
        assert without_time(here(SOME)) == without_time(there(SOME))


def test_a_killed_plan_resumes(tmp_path):
    with Evaluator(work(), cache=tmp_path) as first:
        before = first(SOME[:2])
    (file,) = tmp_path.iterdir()
    # Killed while writing a third line.
    with file.open("a") as half:
        half.write('{"key": "abc", "row": {"mean')
    with Evaluator(work(), cache=tmp_path) as again:
        rows = again(SOME)
        assert (again.simulated, again.from_cache) == (3, 2)
    assert rows[:2] == before
    with Evaluator(work(), cache=tmp_path) as third:
        assert third(SOME) == rows
        assert third.simulated == 0


def test_cached_results_are_readable_by_their_owner_only(tmp_path):
    folder = tmp_path / "new"
    with Evaluator(work(), cache=folder) as evaluate:
        evaluate(SOME[:1])
    (file,) = folder.iterdir()
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600


def test_a_new_price_needs_no_simulation_and_a_new_bandwidth_does(tmp_path):
    disk = SOME[2]
    with Evaluator(work(), cache=tmp_path) as evaluate:
        (before,) = evaluate([disk])
    given = work()
    dearer = replace(given.prices, gpu_per_hour=100.0)
    given.prices = dearer
    with Evaluator(given, cache=tmp_path) as evaluate:
        (after,) = evaluate([disk])
        assert evaluate.simulated == 0
    assert after["cost"] > before["cost"]
    slower = replace(dearer.disks["gp3"], throughput=None, iops=None, base_mib_s=1.0)
    given.prices = replace(dearer, disks={"gp3": slower})
    with Evaluator(given, cache=tmp_path) as evaluate:
        evaluate([disk])
        assert evaluate.simulated == 1


def test_another_trace_profile_or_load_is_another_simulation(tmp_path):
    with Evaluator(work(), cache=tmp_path) as evaluate:
        evaluate(SOME[:1])
        evaluate(SOME[:1], load=1.2)
        assert evaluate.simulated == 2
    other = work()
    other.trace = trace(load=1.1)
    with Evaluator(other, cache=tmp_path) as evaluate:
        evaluate(SOME[:1])
        assert evaluate.simulated == 1
    other = work()
    other.engine = replace(other.engine, device_tokens=32 * BLOCK)
    with Evaluator(other, cache=tmp_path) as evaluate:
        evaluate(SOME[:1])
        assert evaluate.simulated == 1


def test_the_digest_of_a_trace_is_of_its_content():
    assert trace_digest(trace()) == trace_digest(list(trace()))
    assert trace_digest(trace()) != trace_digest(trace(59))
    # Ids of 64 bits, as servers make them.
    large = [replace(r, blocks=tuple(b + (1 << 63) for b in r.blocks)) for r in trace()]
    assert trace_digest(large) != trace_digest(trace())


def test_a_folder_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CanopyError, match="give --cache FOLDER, or --cache off"):
        Cache(tmp_path / "file" / "folder", "x" * 64)


def test_a_disk_gets_the_bandwidth_that_its_size_buys():
    prices = load_prices("alibaba-essd")
    engine = Engine(PROFILE, 1000)
    c = Configuration(dram_gib=1, disk="essd-pl1", disk_gib=100.0)
    config = system_of(c, engine, prices, {})
    assert config.disk.read_bytes_per_s == 170 * 2**20
    assert config.disk.capacity_bytes == 100 * GIB
    assert config.disk.shared_channel


def test_the_ray_backend_gives_the_same_rows():
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install ray")
    with Evaluator(work()) as here, Evaluator(work(), backend="ray") as there:
        assert without_time(here(SOME[:2])) == without_time(there(SOME[:2]))
