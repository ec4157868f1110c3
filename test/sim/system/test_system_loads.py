"""Several loads: saturation, goodput, sessions, and the command's output."""

import json
import random

import pytest
from overlays import flat_line

from canopy_lab.cli.main import main
from canopy_lab.sim.system import SystemConfig, Workload, simulate_system
from canopy_lab.sim.system.loads import LoadedSystem
from sglang_canopy.errors import CanopyError
from support.systems import profile, request, rounds


def random_arrivals(count: int, rate_per_s: float):
    """Return prompts of ten blocks that share nothing, at random times."""
    rng, now_s, requests = random.Random(5), 0.0, []
    for i in range(count):
        now_s += rng.expovariate(rate_per_s)
        requests.append(request(now_s, range(i * 10 + 1, (i + 1) * 10 + 1)))
    return requests


def loaded_system(trace, **options) -> LoadedSystem:
    config = SystemConfig(device_tokens=5000, max_prefill_tokens=1)
    return LoadedSystem(Workload(trace), config, profile(), **options)


@pytest.mark.parametrize("trace_rate_per_s", [2.0, pytest.param(40.0, marks=pytest.mark.long)])
def test_the_saturation_is_one_over_the_prefill_time_at_any_trace_rate(trace_rate_per_s):
    # 100 tokens of 1 ms, one request a step: 10 requests a second.
    saturation = loaded_system(random_arrivals(1500, trace_rate_per_s)).saturation()
    assert saturation == pytest.approx(10.0, rel=0.06)


@pytest.mark.parametrize(("interval_s", "think_s"), [(1.0, 0.2), (0.001, 5.0)])
def test_agents_saturate_at_their_turns_share_of_the_servers_time(interval_s, think_s):
    # Four turns of 0.1 s: 2.5 sessions a second, for any think time. The second trace
    # begins all at once, and all share the delay.
    trace = []
    for i in range(200):
        for turn in range(4):
            first_block = (i * 4 + turn) * 10 + 1
            path = range(first_block, first_block + 10)
            time_s = i * interval_s + turn * think_s
            trace.append(request(time_s, path, conversation=str(i), turn=turn + 1))
    trace.sort(key=lambda sent: sent.time_s)
    saturation = loaded_system(trace, loop="closed").saturation()
    assert saturation == pytest.approx(2.5 * 3600, rel=0.12)


def test_seconds_saved_are_those_that_a_prefill_without_the_hit_takes_longer():
    result = simulate_system(rounds(2, 3), SystemConfig(device_tokens=5000), profile())
    assert result.prefill_s_saved_by_tier["device"] == pytest.approx(4 * 99 * 0.001)
    assert result.prefill_s_saved_by_tier["host"] == 0.0


def test_waiting_before_admission_is_part_of_ttft():
    loaded = loaded_system(random_arrivals(300, 5.0)).run_at(30.0)
    assert loaded.latency.ttft_s.max > 5.0
    assert loaded.latency.ttft_s.max == pytest.approx(loaded.system.ttft_s[60:].max())


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = []
    for i in range(120):
        for turn in range(2):
            first_block = i * 100 + 1
            turn_request = request(
                i * 2.0 + turn, range(first_block, first_block + 10 + turn * 5), output_tokens=3,
                conversation=f"c{i}", turn=turn + 1,
            )  # fmt: skip
            lines.append(flat_line(turn_request))
    path.write_text("\n".join(lines) + "\n")
    return path


def arguments(path, *options):
    return [
        "simulate", "system", str(path), "--format", "agentic",
        "--profile", "qwen2.5-7b-h100",
        "--device-tokens", "4000", *options,
    ]  # fmt: skip


def test_the_command_prints_and_writes_every_load(trace_file, tmp_path, capsys):
    out_file = tmp_path / "loads.json"
    options = ["--closed-loop", "--loads", "0.5,0.9", "--seeds", "2", "--saturation", "4000",
            "--slo", "p99_ttft<30s", "--think-cap-s", "1", "--json-out", str(out_file)]  # fmt: skip
    assert main(arguments(trace_file, *options)) == 0
    printed = capsys.readouterr().out
    assert "saturation   4000 sessions/h" in printed
    assert "100.0%" not in printed.split("goodput")[0]
    result = json.loads(out_file.read_text())
    assert [row["rate"] for row in result["loads"]] == [2000, 3600]
    assert [run["seed"] for run in result["loads"][0]["runs"]] == [0, 1]
    assert len(result["loads"][0]["runs"][0]["latency"]["deciles"]) == 10
    assert result["slo"]["goodput_load"] == 0.9
    assert result["loads"][0]["meets_slo"] is True
    options[options.index("p99_ttft<30s")] = "p99_ttft<1ms"
    assert main(arguments(trace_file, *options)) == 0
    assert json.loads(out_file.read_text())["slo"]["goodput_load"] == 0.0


def test_a_loop_that_does_not_exist_is_refused():
    with pytest.raises(CanopyError, match="loop must be one of open"):
        loaded_system(random_arrivals(5, 1.0), loop="half")
