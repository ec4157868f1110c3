"""Logs as collectors hand them out, captures of gateways, and texts that a gateway replaced."""

import json
from pathlib import Path
from typing import Any

import pytest

from canopy_lab.trace import lines, otel_log
from canopy_lab.trace.guess import guess_format
from canopy_lab.trace.open import open_trace
from sglang_canopy.errors import CanopyError

REQUESTS = 6


def server_lines() -> list[str]:
    found = [
        "[2026-09-20 10:00:00] server_args=ServerArgs(model_path='m')",
        "INFO: Uvicorn running",
    ]
    for at in range(REQUESTS):
        obj = {"rid": f"r{at}", "input_ids": [*range(40 + at)], "text": None, "session_id": "s"}
        stamp, meta = f"2026-09-20T10:00:{at:02d}.000000", {"completion_tokens": 2}
        event = {"timestamp": stamp, "rid": f"r{at}", "obj": obj}
        found.append(json.dumps({**event, "event": "request.received"}))
        found.append(json.dumps({**event, "event": "request.finished", "out": {"meta_info": meta}}))
    return found


def as_object(line: str) -> dict[str, Any]:
    """Google Cloud parses lines of JSON, and leaves the others as text."""
    key = "jsonPayload" if line.startswith("{") else "textPayload"
    return {key: json.loads(line) if line.startswith("{") else line, "severity": "INFO"}


WRAPPINGS = {
    "google-cloud-text": lambda line: {"timestamp": "2026-09-20T10:00:00Z", "textPayload": line},
    "google-cloud-json": as_object,
    "fluent-bit": lambda line: {"date": 1789898400.1, "log": line, "kubernetes": {"pod": "p"}},
    "journald": lambda line: {"__REALTIME_TIMESTAMP": "1789898400000000", "MESSAGE": line},
    "vector": lambda line: {"message": line, "timestamp": "2026-09-20T10:00:00Z", "host": "h"},
    "opentelemetry": lambda line: {"timeUnixNano": "1", "log_record": {"text": {"value": line}}},
}


def wrapped(folder: Path, wrap: Any) -> Path:
    path = folder / "server.log"
    path.write_text("".join(json.dumps(wrap(line)) + "\n" for line in server_lines()))
    return path


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)
def test_a_servers_log_from_a_collector_is_read(tmp_path: Path, wrap: Any) -> None:
    path = wrapped(tmp_path, wrap)
    assert guess_format(path) == "sglang"
    assert [r.input_tokens for r in open_trace(path, "sglang")] == [
        40 + at for at in range(REQUESTS)
    ]


def test_a_gateways_log_from_a_collector_is_read(tmp_path: Path) -> None:
    rows = [{"time": 1.7e9 + at, "prompt": "words " * 90} for at in range(REQUESTS)]
    path = tmp_path / "gateway.log"
    path.write_text(
        "".join(json.dumps({"log": json.dumps(row), "pod": "p"}) + "\n" for row in rows)
    )
    assert guess_format(path) == "openai"
    assert len(list(open_trace(path, "openai"))) == REQUESTS


def test_coloured_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("".join(f"\x1b[32m{line}\x1b[0m\n" for line in server_lines()))
    assert len(list(open_trace(path, guess_format(path)))) == REQUESTS


def test_an_unknown_wrapping_is_named(tmp_path: Path) -> None:
    """It was said that the server had logged no request."""
    path = wrapped(tmp_path, lambda line: {"at": 1, "packed": [line]})
    with pytest.raises(CanopyError, match=r"objects with the fields at, packed"):
        guess_format(path)
    with pytest.raises(CanopyError, match=r"fields at, packed, a wrapping that is not known"):
        list(open_trace(path, "sglang"))


def test_dynamos_own_capture_is_read(tmp_path: Path) -> None:
    """Requests are captured at their ends, among other events."""

    def event(kind: str, **more: Any) -> dict[str, Any]:
        agent = {"session_id": "s"}
        return {
            "schema": "dynamo.request.trace.v1",
            "event_type": kind,
            "agent_context": agent,
            **more,
        }

    blocks = [1 << 63, 5, 6, 7]
    rows = [event("tool_end", tool={"name": "search"})]
    for at in (1, 0, 2):  # the first ends after the second
        replay = {"trace_block_size": 64, "input_length": 64 * (at + 1), "input_sequence_hashes": blocks[: at + 1]}  # fmt: skip
        request = {
            "request_received_ms": 1_780_000_000_000 + at,
            "output_tokens": 9,
            "replay": replay,
        }
        rows.append(event("request_end", request=request))
    path = tmp_path / "dynamo.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = list(open_trace(path, guess_format(path)))
    assert [(r.input_tokens, r.output_tokens, r.block_tokens) for r in found] == [
        (64, 9, 64), (128, 9, 64), (192, 9, 64),
    ]  # fmt: skip
    assert found[1].blocks[0] == found[0].blocks[0]
    assert {r.conversation for r in found} == {"s"}


def spans(cached_are_in: bool) -> list[dict[str, Any]]:
    found = []
    for at in range(4):
        cached, new = (0, 900) if at == 0 else (800, 100 * at)
        attributes = {
            "gen_ai.operation.name": "chat", "gen_ai.request.model": "m",
            "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "w " * 1800}]}]),
            "gen_ai.usage.input_tokens": new + cached * cached_are_in,
            "gen_ai.usage.cache_read.input_tokens": cached,
        }  # fmt: skip
        found.append({"traceId": f"{at:032x}", "spanId": f"{at:016x}", "startTimeUnixNano": str(10**18 + at * 10**9), "attributes": attributes})  # fmt: skip
    return found


def test_counts_of_spans_that_leave_out_cached_tokens_are_made_whole(tmp_path: Path) -> None:
    counts = []
    for cached_are_in in (True, False):
        path = tmp_path / f"{cached_are_in}.jsonl"
        path.write_text("".join(json.dumps(span) + "\n" for span in spans(cached_are_in)))
        counts.append([p.logged_tokens for p in otel_log.prompts(path, lines.Tolerance(path))])
    assert counts[0] == counts[1] == [900, 900, 1000, 1100]


@pytest.mark.parametrize("mark", ["redacted-by-litellm", "[REDACTED]", "<masked>", "****"])
def test_redacted_texts_are_refused(tmp_path: Path, mark: str) -> None:
    """Equal marks look like equal prompts: LRU hit 99 % of them."""
    messages = [{"role": "system", "content": mark}, {"role": "user", "content": mark}]
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"time": 1.7e9, "messages": messages}) + "\n")
    with pytest.raises(CanopyError, match="line 1: its texts are redacted"):
        list(open_trace(path, "openai"))
    messages[1]["content"] = f"Why does it say {mark}?"
    path.write_text(json.dumps({"time": 1.7e9, "messages": messages}) + "\n")
    assert len(list(open_trace(path, "openai"))) == 1


def test_claude_codes_session_is_in_the_users_name(tmp_path: Path) -> None:
    rows = [
        {"time": 1.7e9 + at, "body": {"messages": [{"role": "user", "content": f"hello {at}"}],
         "metadata": {"user_id": f"user_ab_account__session_0000000{at % 2}-0000"}}}
        for at in range(4)
    ]  # fmt: skip
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [r.conversation for r in open_trace(path, "openai")]
    assert found == ["00000000-0000", "00000001-0000"] * 2
