"""Hit rates and latencies out of replies, and tables out of results."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from canopy_lab.live.replay import options, report
from canopy_lab.live.replay.endpoint import Reply
from canopy_lab.live.replay.outcome import summarise
from canopy_lab.live.replay.schedule import ReplayRequest
from canopy_lab.trace import TraceRequest
from canopy_lab.trace.materialise import Planned


def job(
    category: str, prompt: int, cached: int | None, ttft: float = 0.1, turn: int = 1, **reply: Any
) -> ReplayRequest:
    request = TraceRequest(0.0, prompt, 2, (), 1, category=category, turn=turn, conversation="c")
    tiers = {} if cached is None else {"device": cached, "host": 0, "storage": 0}
    answered = Reply(10.0, first_s=10.0 + ttft, done_s=11.0, output_tokens=2, cached_tokens=cached)
    answered.by_tier = tiers
    for name, value in reply.items():
        setattr(answered, name, value)
    return ReplayRequest(Planned(request, 0, prompt, 2, None), {}, due_s=9.5, reply=answered)


def test_hit_rates_weigh_tokens_and_leave_failures_out() -> None:
    jobs = [job("a", 100, 50), job("b", 300, 0), job("a", 999, 999, error="503: busy")]
    summary = summarise(jobs, duration_s=2.0)
    assert summary["overall"]["hit_rate"] == 50 / 400
    assert summary["by_category"]["a"]["hit_rate"] == 0.5
    assert summary["overall"]["hit_rate_by_tier"] == {"device": 0.125, "host": 0.0, "storage": 0.0}
    assert (summary["completed"], summary["errors"]) == (2, {"count": 1, "kinds": {"503: busy": 1}})
    assert summary["throughput"]["output_tokens_per_s"] == 2.0


def test_queued_ttft_begins_when_the_request_was_due() -> None:
    made = summarise([job("a", 10, 0, ttft=0.2)], 1.0)["overall"]
    assert made["ttft_ms"]["mean"] == pytest.approx(200)
    assert made["queued_ttft_ms"]["p99"] == pytest.approx(700)


def test_an_endpoint_that_does_not_report_hits_has_no_hit_rate() -> None:
    made = summarise([job("a", 10, None)], 1.0)["overall"]
    assert made["hit_rate"] is None
    assert made["hit_rate_by_tier"] is None


def test_a_run_of_failures_has_a_summary() -> None:
    made = summarise([job("a", 10, 0, error="x")], 1.0)
    assert made["completed"] == 0
    assert made["overall"]["ttft_ms"] is None


def result(label: str, hits: int) -> dict[str, Any]:
    jobs = [job("a", 100, hits), job("b", 100, 0, turn=7)]
    return {"label": label, "outputs_forced": True, "options": {},
            "duration_s": 1.0, **summarise(jobs, 1.0)}  # fmt: skip


def test_results_are_shown_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for label, hits in (("lru", 10), ("wa", 30)):
        (tmp_path / label).write_text(json.dumps(result(label, hits)))
    assert report.main([str(tmp_path / "lru"), str(tmp_path / "wa")]) == 0
    rows = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert rows[0][2:4] == ["hit rate, lru", "hit rate, wa"]
    assert rows[2][:5] == ["all", "2", "200", "5.0%", "15.0%"]
    assert rows[3][:5] == ["category a", "1", "100", "10.0%", "30.0%"]
    assert report.main([str(tmp_path / "missing")]) == 2


def test_labels_are_names_the_server_accepts() -> None:
    fields = options.labels(TraceRequest(0.0, 1, 1, (), 1, "kind 1", 2, "c1", "end"))
    assert fields == {
        "canopy_category": "kind_1", "canopy_turn": 2, "canopy_conversation": "c1", "canopy_stop": "end",
    }  # fmt: skip
    stamp = pytest.importorskip("sglang_canopy.wire.stamp")
    assert stamp.client_fields(fields)[0]["category"] == "kind_1"
