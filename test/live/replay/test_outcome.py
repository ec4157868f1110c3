"""Hit rates and latencies of replies, tables of results, latency targets, and rates of requests."""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from canopy_lab.latency.slo import parse_slo
from canopy_lab.live.replay import options, report
from canopy_lab.live.replay.endpoint import Reply
from canopy_lab.live.replay.outcome import summarise
from canopy_lab.live.replay.rates import goodput_rate
from canopy_lab.live.replay.schedule import ReplayRequest
from canopy_lab.trace import TraceRequest
from canopy_lab.trace.materialise import PlannedJob
from sglang_canopy.errors import CanopyError
from sglang_canopy.wire import stamp


def answered_job(
    ordinal: int = 0, due: float = 9.5, sent: float = 10.0, first: float = 10.1, done: float = 11.0,
    *, category: str = "a", prompt: int = 10, cached: int | None = 0, turn: int = 1,
    conversation: str = "c", error: str = "",
) -> ReplayRequest:  # fmt: skip
    """A request and its answer, with times in seconds."""
    labels = {"category": category, "turn": turn, "conversation": conversation}
    request = TraceRequest(float(ordinal), prompt, 2, (), 1, **labels)
    reply = Reply(sent, first_s=first, done_s=done, output_tokens=2, cached_tokens=cached)
    reply.by_tier = {} if cached is None else {"device": cached, "host": 0, "storage": 0}
    reply.error = error
    return ReplayRequest(PlannedJob(request, ordinal, prompt, 2, None), {}, due_s=due, reply=reply)


def test_hit_rates_weigh_tokens_and_leave_failures_out() -> None:
    jobs = [answered_job(prompt=100, cached=50), answered_job(category="b", prompt=300)]
    jobs.append(answered_job(prompt=999, cached=999, error="503: busy"))
    summary = summarise(jobs, duration_s=2.0)
    assert summary["overall"]["hit_rate"] == 50 / 400
    assert summary["by_category"]["a"]["hit_rate"] == 0.5
    assert summary["overall"]["hit_rate_by_tier"] == {"device": 0.125, "host": 0.0, "storage": 0.0}
    assert (summary["completed"], summary["errors"]) == (2, {"count": 1, "kinds": {"503: busy": 1}})
    assert summary["throughput"]["output_tokens_per_s"] == 2.0


def test_an_endpoint_that_does_not_report_hits_has_no_hit_rate() -> None:
    overall = summarise([answered_job(cached=None)], 1.0)["overall"]
    assert overall["hit_rate"] is None
    assert overall["hit_rate_by_tier"] is None


def test_the_wait_at_the_client_is_part_of_ttft() -> None:
    jobs = [answered_job(i, due=0.0, sent=float(i), first=i + 0.5, done=i + 1.0) for i in range(10)]
    summary = summarise(jobs, 10.0, warm_up_share=0.0)
    assert summary["overall"]["ttft_ms"]["mean"] == pytest.approx(500)
    assert summary["overall"]["queued_ttft_ms"]["mean"] == pytest.approx(5000)
    assert summary["latency"]["ttft_s"]["mean"] == pytest.approx(5.0)
    assert summary["latency"]["ttft_s"]["max"] == pytest.approx(9.5)
    deciles = [decile["ttft_s"]["mean"] for decile in summary["latency"]["deciles"]]
    assert deciles == pytest.approx([i + 0.5 for i in range(10)])


def test_a_session_includes_its_sub_agents() -> None:
    jobs = [
        answered_job(i, 3.0 * i, 3.0 * i, 3.0 * i + 1, 3.0 * i + 2, conversation=name)
        for i, name in enumerate(("a", "a/1", "b"))
    ]
    latency = summarise(jobs, 8.0, warm_up_share=0.0)["latency"]
    assert latency["sessions"] == 2
    assert latency["sessions_per_hour"] == pytest.approx(2 * 3600 / 8)
    assert latency["session_s"]["max"] == pytest.approx(5.0)


def test_a_run_with_an_error_meets_no_target_and_one_of_errors_alone_has_no_latency() -> None:
    jobs = [answered_job(i, float(i), float(i), i + 0.5, i + 1.0) for i in range(5)]
    slo = parse_slo("p99_ttft<2s")
    assert summarise(jobs, 5.0, slo=slo)["meets_slo"] is True
    assert summarise(jobs, 5.0)["meets_slo"] is None
    jobs[0].reply.error = "503: busy"
    assert summarise(jobs, 5.0, slo=slo)["meets_slo"] is False
    failed = summarise([answered_job(error="503: busy")], 5.0, slo=slo)
    assert (failed["completed"], failed["overall"]["ttft_ms"], failed["latency"]) == (0, None, None)


def result_of(label: str, hits: int) -> dict[str, Any]:
    jobs = [answered_job(prompt=100, cached=hits), answered_job(category="b", prompt=100, turn=7)]
    return {"label": label, "outputs_forced": True, "options": {},
            "duration_s": 1.0, **summarise(jobs, 1.0)}  # fmt: skip


def test_results_are_shown_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for label, hits in (("lru", 10), ("wa", 30)):
        (tmp_path / label).write_text(json.dumps(result_of(label, hits)))
    assert report.main([str(tmp_path / "lru"), str(tmp_path / "wa")]) == 0
    lines = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0][2:4] == ["hit rate, lru", "hit rate, wa"]
    assert lines[2][:5] == ["all", "2", "200", "5.0%", "15.0%"]
    assert lines[3][:5] == ["category a", "1", "100", "10.0%", "30.0%"]
    assert report.main([str(tmp_path / "missing")]) == 2


def test_labels_are_names_the_server_accepts() -> None:
    request = TraceRequest(0.0, 1, 1, (), 1, "kind 1", 2, "c1", "end")
    fields = options.labels_of(request)
    assert fields == {
        "canopy_category": "kind_1", "canopy_turn": 2, "canopy_conversation": "c1", "canopy_stop": "end",
    }  # fmt: skip
    assert stamp.client_fields(fields)[0]["category"] == "kind_1"
    names = ["c" * stamp.MAX_NAME_CHARS + end for end in "12"]
    labels = [options.labels_of(replace(request, conversation=name)) for name in names]
    assert len({stamp.client_fields(fields)[0]["conversation"] for fields in labels}) == 2


def test_goodput_is_the_highest_rate_below_which_all_meet_the_target() -> None:
    rows = [{"rate": r, "meets_slo": meets} for r, meets in ((3, True), (1, True), (2, False))]
    assert goodput_rate(rows) == 1
    assert goodput_rate([{"rate": 1, "meets_slo": False}]) == 0.0


def test_a_rate_stretches_the_traces_times() -> None:
    jobs = [*map(answered_job, range(11))]
    offsets_s = options.due_offsets_s(jobs, 1.0, float("inf"), 0, mean_requests_per_s=2.2)
    assert offsets_s[-1] == pytest.approx(5.0)


def test_sessions_of_a_closed_loop_begin_at_a_rate_and_think_in_scaled_time() -> None:
    jobs = [answered_job(i, 0.0, 0.0, 1.0, 2.0, conversation=str(i // 2)) for i in range(4000)]
    links = options.link_turns(jobs, 0.5, 120.0)
    assert links.think_s[:4] == [0.0, 0.5, 0.0, 0.5]
    offsets_s = options.session_offsets_s(links, 3600.0, 1)
    assert offsets_s[-2] == pytest.approx(2000, rel=0.1)
    assert offsets_s[-1] == 0.0


def parsed_arguments(**flags: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    parser.add_argument("--request-rate", type=float, default=float("inf"))
    args = options.parse(parser.parse_args(argv))
    args.num_prompts, args.dataset_path = 1, "x"
    return args


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"slo": "fast"}, "an SLO is written like"),
        ({"rates": "1,x"}, "--rates must be numbers above 0"),
        ({"rates": "1", "request_rate": 2.0}, "drop one of them"),
        ({"warm_up_share": 1.0}, "--warm-up-share must be"),
        ({"think_cap_s": -1.0}, "--think-cap-s must be"),
    ],
)
def test_invalid_options_are_refused(flags: dict[str, Any], message: str) -> None:
    options.check(parsed_arguments())
    with pytest.raises(CanopyError, match=message):
        options.check(parsed_arguments(**flags))
