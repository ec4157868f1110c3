"""Latencies since the due times, targets and rates in the benchmark's report."""

import argparse
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from canopy_lab.latency.slo import parse_slo
from canopy_lab.live.replay import options
from canopy_lab.live.replay.endpoint import Reply
from canopy_lab.live.replay.outcome import summarise
from canopy_lab.live.replay.rates import goodput_rate
from canopy_lab.live.replay.schedule import ReplayRequest
from canopy_lab.trace import TraceRequest
from canopy_lab.trace.materialise import Planned
from sglang_canopy.errors import CanopyError


def job(i: int, due: float, sent: float, first: float, done: float, **others: Any) -> ReplayRequest:
    """A request and its answer; ``conversation`` names its session, ``error`` what went wrong."""
    conversation = others.pop("conversation", str(i))
    request = TraceRequest(float(i), 100 * (i + 1), 2, (), 1, conversation=conversation, **others)
    reply = Reply(sent, first_s=first, done_s=done, output_tokens=2, cached_tokens=0)
    return ReplayRequest(Planned(request, i, 100 * (i + 1), 2, None), {}, due_s=due, reply=reply)


def test_the_wait_at_the_client_is_part_of_ttft() -> None:
    jobs = [job(i, due=0.0, sent=float(i), first=i + 0.5, done=i + 1.0) for i in range(10)]
    summary = summarise(jobs, 10.0, warm_up_share=0.0)
    assert summary["overall"]["ttft_ms"]["mean"] == pytest.approx(500)
    assert summary["latency"]["ttft_s"]["mean"] == pytest.approx(5.0)
    assert summary["latency"]["ttft_s"]["max"] == pytest.approx(9.5)
    assert [d["ttft_s"]["mean"] for d in summary["latency"]["deciles"]] == [
        pytest.approx(i + 0.5) for i in range(10)
    ]


def test_sessions_hold_their_sub_agents() -> None:
    jobs = [
        job(0, 0.0, 0.0, 1.0, 2.0, conversation="a"),
        job(1, 3.0, 3.0, 4.0, 5.0, conversation="a/1"),
        job(2, 6.0, 6.0, 7.0, 8.0, conversation="b"),
    ]
    latency = summarise(jobs, 8.0, warm_up_share=0.0)["latency"]
    assert latency["sessions"] == 2
    assert latency["sessions_per_hour"] == pytest.approx(2 * 3600 / 8)
    assert latency["session_s"]["max"] == pytest.approx(5.0)


def test_a_run_with_an_error_meets_no_target() -> None:
    good = [job(i, float(i), float(i), i + 0.5, i + 1.0) for i in range(5)]
    slo = parse_slo("p99_ttft<2s")
    assert summarise(good, 5.0, slo=slo)["meets_slo"] is True
    assert summarise(good, 5.0)["meets_slo"] is None
    good[0].reply.error = "503: busy"
    assert summarise(good, 5.0, slo=slo)["meets_slo"] is False
    for one in good:
        one.reply.error = "503: busy"
    assert summarise(good, 5.0, slo=slo)["latency"] is None


def test_goodput_is_the_highest_rate_below_which_all_meet_the_target() -> None:
    rows = [{"rate": r, "meets_slo": met} for r, met in ((3, True), (1, True), (2, False))]
    assert goodput_rate(rows) == 1
    assert goodput_rate([{"rate": 1, "meets_slo": False}]) == 0.0


def test_a_rate_stretches_the_traces_times() -> None:
    jobs = [job(i, 0.0, 0.0, 1.0, 2.0) for i in range(11)]
    assert options.offsets_s(jobs, 1.0, float("inf"), 0, mean_rate=2.2)[-1] == pytest.approx(5.0)


def test_sessions_of_a_closed_loop_begin_at_a_rate_and_think_in_scaled_time() -> None:
    jobs = [job(i, 0.0, 0.0, 1.0, 2.0, conversation=str(i // 2)) for i in range(4000)]
    links = options.closed_loop(jobs, 0.5, 120.0)
    assert links.think_s[:4] == [0.0, 0.5, 0.0, 0.5]
    offsets = options.session_offsets_s(links, 3600.0, 1)
    assert offsets[-2] == pytest.approx(2000, rel=0.1)
    assert offsets[-1] == 0.0


def arguments(**flags: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    typed = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    parser.add_argument("--request-rate", type=float, default=float("inf"))
    args = options.parse(parser.parse_args(typed))
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
def test_options_that_cannot_be_are_refused(flags: dict[str, Any], message: str) -> None:
    options.check(arguments())
    with pytest.raises(CanopyError, match=message):
        options.check(arguments(**flags))
