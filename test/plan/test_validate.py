"""A server's log compared with the simulation. The log is of a simulated server with known step times."""

import datetime
import json
from types import SimpleNamespace

import numpy as np
import pytest

from canopy_lab.cli.main import main
from canopy_lab.plan.server_plan import write_config
from canopy_lab.plan.validation import recalibrate, rescale, system_config, validate
from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.system import Workload, load_profile, simulate_system
from canopy_lab.trace.open import last_hours
from canopy_lab.trace.record import TraceRequest
from canopy_lab.trace.served_log import read_served
from canopy_lab.trace.sglang_log import last_flush, read_as_server
from sglang_canopy.errors import CanopyError

PROFILE = load_profile("llama-3.1-8b-a100")
SERVER_PLAN = {
    "radix-eviction": "canopy-lru",
    "canopy-host-eviction": "canopy-lru",
    "canopy-host-gb": (1 << 31) / 1e9,
    "page-size": 64,
    "max-total-tokens": 12_000,
    "max-running-requests": 64,
}
LOG_START = datetime.datetime(2026, 11, 22, tzinfo=datetime.UTC)


def prompts(count=150):
    """Yield (seconds, token ids) of growing conversations, faster than the server computes."""
    rng = np.random.default_rng(0)
    time_s, history = 0.0, {}
    for _ in range(count):
        time_s += float(rng.exponential(0.12))
        number = int(rng.integers(12))
        history[number] = [*history.get(number, [])[:3000], *rng.integers(0, 30_000, 400).tolist()]
        yield time_s, list(history[number])


def log_line(event, time_s, body):
    timestamp = (LOG_START + datetime.timedelta(seconds=time_s)).isoformat()
    return json.dumps({"timestamp": timestamp, "event": f"request.{event}", **body}) + "\n"


def write_log(path, prompts_sent, result=None):
    """Write SGLang's log; without a result, each request takes 0.2 s."""
    events = []
    for i, (time_s, ids) in enumerate(prompts_sent):
        obj = {"input_ids": ids, "sampling_params": {}}
        events.append((time_s, log_line("received", time_s, {"rid": str(i), "obj": obj})))
        ttft_s, e2e_s = (0.1, 0.2) if result is None else (result.ttft_s[i], result.e2e_s[i])
        meta_info = {
            "completion_tokens": 16, "finish_reason": {"type": "stop"}, "e2e_latency": e2e_s,
            "cached_tokens": 0 if result is None else int(result.cached_tokens[i]),
            "request_received_ts": 1000.0 + time_s,
            "prefill_finished_time": 1000.0 + time_s + ttft_s, "first_token_latency": e2e_s,
        }  # fmt: skip
        body = {"rid": str(i), "obj": obj, "out": {"meta_info": meta_info}}
        events.append((time_s + e2e_s, log_line("finished", time_s + e2e_s, body)))
    path.write_text("".join(text for _, text in sorted(events, key=lambda event: event[0])))
    return path


@pytest.fixture
def server_log(tmp_path):
    """The log of a server whose steps take 1.5 times the profile's."""
    prompts_sent = list(prompts())
    draft = write_log(tmp_path / "draft.log", prompts_sent)
    trace = CompactTrace(read_as_server(draft, block_tokens=64))
    config = system_config(SERVER_PLAN, PROFILE)
    simulated = simulate_system(Workload(trace, logged_times=True), config, rescale(PROFILE, 1.5))
    return write_log(tmp_path / "server.log", prompts_sent, simulated)


def read_trace_and_times(log_path):
    return CompactTrace(read_as_server(log_path, block_tokens=64)), read_served(log_path)


def test_a_right_prediction_has_no_error(server_log):
    trace, times = read_trace_and_times(server_log)
    validation = validate(trace, times, system_config(SERVER_PLAN, PROFILE), rescale(PROFILE, 1.5))
    for name in ("mean_ttft_s", "p50_ttft_s", "p99_ttft_s", "throughput_tokens_per_s"):
        assert abs(validation.error(name)) < 0.01, name
    assert abs(validation.error("token_hit_ratio")) < 0.001
    assert 0.2 < validation.measured["token_hit_ratio"] < 1


def test_a_wrong_profile_is_detected_and_recalibrated(server_log):
    trace, times = read_trace_and_times(server_log)
    config = system_config(SERVER_PLAN, PROFILE)
    uncorrected = validate(trace, times, config, PROFILE)
    assert uncorrected.error("mean_ttft_s") < -0.2
    factor, corrected, held_out = recalibrate(trace, times, config, PROFILE)
    assert factor == pytest.approx(1.5, rel=0.02)
    assert corrected.notes["recalibrated"] == factor
    assert abs(held_out.error("mean_ttft_s")) < 0.05


def test_the_command_prints_and_writes_the_errors(server_log, tmp_path, capsys):
    plan, out, profile = (tmp_path / name for name in ("plan.yaml", "errors.json", "new.json"))
    write_config(plan, SERVER_PLAN, {})
    command = ["validate", str(server_log), "--plan", str(plan), "--profile", PROFILE.name]
    assert main([*command, "--json-out", str(out), "--recalibrate", str(profile)]) == 0
    printed = capsys.readouterr().out
    assert "p99 ttft, s " in printed
    assert "throughput, tokens/s " in printed
    assert "few requests" not in printed
    assert "Step times x 1.5" in printed
    errors = json.loads(out.read_text())["errors"]
    assert errors["mean_ttft_s"] < -0.2
    assert load_profile(profile).notes["recalibrated"] == pytest.approx(1.5, rel=0.02)


def test_flushed_kv_is_not_predicted_to_be_hit(tmp_path, capsys):
    """All conversations, a flush, and their last prompts again: none is cached."""
    first_prompts = list(prompts(60))
    end_s, _ = first_prompts[-1]
    repeated = [(end_s + 5 + 0.2 * i, ids) for i, (_, ids) in enumerate(first_prompts[-40:])]
    config = system_config(SERVER_PLAN, PROFILE)
    logs = []
    for name, sent in (("before", first_prompts), ("after", repeated)):
        draft = write_log(tmp_path / name, sent)
        trace = CompactTrace(read_as_server(draft, block_tokens=64))
        simulated = simulate_system(Workload(trace, logged_times=True), config, PROFILE)
        logs.append(write_log(tmp_path / name, sent, simulated).read_text().replace('"rid": "', f'"rid": "{name}'))  # fmt: skip
    log = tmp_path / "server.log"
    flush = "[2026-11-22 00:00:20] Cache flushed successfully!\n"
    log.write_text(flush.join(logs))
    plan, out = tmp_path / "plan.yaml", tmp_path / "errors.json"
    write_config(plan, SERVER_PLAN, {})
    command = ["validate", str(log), "--plan", str(plan), "--profile", PROFILE.name]
    assert main([*command, "--json-out", str(out)]) == 0
    validation = json.loads(out.read_text())
    assert abs(validation["errors"]["token_hit_ratio"]) < 0.001
    assert abs(validation["errors"]["mean_ttft_s"]) < 0.01
    assert validation["requests"] == 36
    assert "flushed" in capsys.readouterr().out


def test_a_prompt_about_a_flush_is_no_flush(tmp_path):
    log = tmp_path / "server.log"
    body = {"rid": "1", "obj": {"text": "Cache flushed successfully!"}}
    log.write_text(log_line("received", 1.0, body))
    assert last_flush(log) == 0
    log.write_text("INFO\n[2026-11-22 00:00:20 TP0] Cache flushed successfully!\nINFO\n")
    assert last_flush(log) == 2


def test_a_start_empties_the_cache_as_a_flush_does(tmp_path):
    log = tmp_path / "server.log"
    start = "[2026-11-22 00:00:20] server_args=ServerArgs(model_path='m')\n"
    log.write_text(start + log_line("received", 1.0, {"rid": "1", "obj": {}}) + start + "INFO\n")
    assert last_flush(log) == 3


def test_the_pool_of_the_log_is_the_servers(server_log, tmp_path, capsys):
    plan = tmp_path / "plan.yaml"
    write_config(plan, {"radix-eviction": "canopy-lru"}, {})
    command = ["validate", str(server_log), "--plan", str(plan), "--profile", PROFILE.name]
    assert main(command) == 2
    assert "give --device-tokens" in capsys.readouterr().err
    server_log.write_text("[2026-11-22 00:00:01 TP0] max_total_num_tokens=12000, c\n" + server_log.read_text())  # fmt: skip
    assert main(command) == 0
    assert "mean ttft" in capsys.readouterr().out


def test_the_error_of_a_log_without_times_names_the_flag(tmp_path, capsys):
    log = tmp_path / "server.log"
    body = {"rid": "1", "obj": {"input_ids": [1]}, "out": {"meta_info": {"completion_tokens": 1}}}
    log.write_text(log_line("finished", 1.0, body))
    with pytest.raises(CanopyError, match=r"start the server with .*--enable-metrics"):
        read_served(log)


def test_a_plan_without_a_pool_size_is_refused():
    with pytest.raises(CanopyError, match="give --device-tokens"):
        system_config({"canopy-host-gb": 1.0}, PROFILE)
    disk_config = {"capacity_bytes": 1 << 30}
    plan = {"canopy-host-gb": 1.0, "hicache-storage-backend-extra-config": disk_config}
    with pytest.raises(CanopyError, match="give --disk-mib-per-s"):
        system_config(plan, PROFILE, device_tokens=1000)


def sequential_client(count=40, answer_s=0.03):
    """Return (seconds, token ids) of a client that waits for each answer and mostly repeats its prompts, and
    the hits of an endless cache."""
    rng = np.random.default_rng(1)
    prompts_sent, hit_tokens, seen_conversations = [], [], set()
    for i in range(count):
        conversation = int(rng.integers(6))
        prompts_sent.append((i * 1.5 * answer_s, [7000 + 10 * conversation, *range(8000, 8192)]))
        hit_tokens.append(192 if conversation in seen_conversations else 0)
        seen_conversations.add(conversation)
    return prompts_sent, np.array(hit_tokens), np.full(count, answer_s)


def test_hits_are_right_under_a_slow_profile(tmp_path):
    """Guards against a simulation in which a repeated question arrives during the first answer, because the
    profile is slower than the server: the client waited for each answer."""
    prompts_sent, hit_tokens, answer_s = sequential_client()
    result = SimpleNamespace(ttft_s=answer_s / 2, e2e_s=answer_s, cached_tokens=hit_tokens)
    trace, times = read_trace_and_times(write_log(tmp_path / "server.log", prompts_sent, result))
    slow_profile = rescale(PROFILE, 20.0)
    validation = validate(trace, times, system_config(SERVER_PLAN, slow_profile), slow_profile)
    assert validation.error("mean_ttft_s") > 1
    assert abs(validation.error("token_hit_ratio")) < 0.001


def log_at_hours(*hours):
    return [TraceRequest(hour * 3600, 10, 1, (1,), 16, line=i) for i, hour in enumerate(hours)]


def test_the_last_hours_end_at_the_last_request():
    last_requests = last_hours(log_at_hours(0, 5, 8.5, 9, 10), 2)
    assert [request.line for request in last_requests] == [2, 3, 4]
    assert [request.time_s for request in last_requests] == [0, 1800, 5400]


def test_a_log_without_requests_is_refused_with_the_reason():
    with pytest.raises(CanopyError, match="no finished request yet"):
        last_hours([], 1)


@pytest.mark.parametrize("hours", [0, -1, 200, float("nan")])
def test_the_hours_must_be_within_a_week(hours):
    with pytest.raises(CanopyError, match="at most 168"):
        last_hours(log_at_hours(1), hours)
