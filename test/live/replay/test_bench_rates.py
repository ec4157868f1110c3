"""``--rates``, ``--closed-loop`` and ``--slo`` through the whole command, against an endpoint whose
answers take a known time. (``test/served/test_bench_serving.py`` has the real server.)"""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang.benchmark.serving")
pytest.importorskip("aiohttp")

from sglang_canopy.bench_serving import replay

ANSWER_S = 0.05


class Endpoint(ThreadingHTTPServer):
    """Answers ``/generate`` after a delay, and records the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path != "/generate":
            self.server.asked.append("flush")
            self.reply("text/plain", "ok")
            return
        body = json.loads(raw)
        self.server.asked.append("generate")
        time.sleep(ANSWER_S)
        count = body["sampling_params"]["max_new_tokens"]
        meta = {"completion_tokens": count, "prompt_tokens": len(body["input_ids"]),
                "cached_tokens": 0, "finish_reason": {"type": "length"}}  # fmt: skip
        event = {"text": "x", "output_ids": list(range(count)), "meta_info": meta}
        self.reply("text/event-stream", f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")

    def do_GET(self) -> None:
        self.reply("application/json", "{}")

    def reply(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three agents of three turns; each thinks for 0.2 s."""
    path = tmp_path / "agents.jsonl"
    rows = [
        {"t": turn * 1.0 + who / 10, "in": 40 + 10 * turn, "out": 2, "block_size": 10,
         "hash_ids": [100 * who + i for i in range(4 + turn)], "turn": turn + 1,
         "conversation": f"c{who}", "think_time": 0.2}
        for turn in range(3) for who in range(3)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_agents_are_replayed_at_every_rate(endpoint: Endpoint, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = replay(
        "agentic", str(trace), endpoint.url, "none", vocab_size=1000, closed_loop=True,
        rates="36000,360000", slo="max_ttft<1h", warm_up_share=0, output_file=str(out),
        output_details=True,
    )  # fmt: skip
    assert json.loads(out.read_text()) == result
    assert [row["rate"] for row in result["rates"]] == [36000, 360000]
    assert result["goodput_rate"] == 360000
    assert endpoint.asked.count("flush") == 2
    assert endpoint.asked.count("generate") == 2 * (9 + 1)  # and a probe each
    for row in result["rates"]:
        assert row["latency"]["sessions"] == 3
        assert row["latency"]["session_s"]["p50"] >= 3 * ANSWER_S + 2 * 0.2
    answered: dict[str, float] = {}
    for request in result["details"]:
        before = answered.get(request["conversation"])
        if before is not None:
            assert request["due_s"] >= before + 0.2 - 0.002  # times are rounded to 1 ms
        answered[request["conversation"]] = request["done_s"]
