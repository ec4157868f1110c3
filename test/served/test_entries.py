"""Other ways in: ``sglang.Engine``, ``sglang serve``, SGLang's gRPC port, several tokenizer workers."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from launch_server import cpu_arguments, free_port, healthy
from support.prompts import token_ids
from support.served import until
from support.small_models import LLAMA, write_model

pytestmark = pytest.mark.long
FIELDS = {"canopy_category": "agent", "canopy_turn": 2}
ENGINE = """
import json, pathlib, os, sys, time, sglang
if __name__ == "__main__":
    engine = sglang.Engine(
        model_path=sys.argv[1], device="cpu", dtype="float32", max_total_tokens=2048,
        disable_overlap_schedule=True, radix_eviction_policy="wa", enable_cache_report=True,
    )
    def answered(prompt):
        fields = {"canopy_category": "agent", "canopy_turn": 2}
        sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True, "custom_params": fields}
        answer = engine.generate(input_ids=prompt, sampling_params=sampling)
        return answer["output_ids"], answer["meta_info"]["cached_tokens"]
    prompts, cold = json.loads(sys.stdin.read()), []
    for prompt in prompts:
        engine.flush_cache()
        cold.append(answered(prompt))
    engine.flush_cache()
    warm = [answered(prompt) for prompt in prompts]
    written = pathlib.Path(os.environ["CANOPY_STATUS_DIR"], "rank-0.json")
    while sum(  # it is written once a second
        row["requests"] for row in json.loads(written.read_text())["categories"]
    ) < 2 * len(prompts):
        time.sleep(0.1)
    print("ANSWERS " + json.dumps([cold, warm]), flush=True)
    engine.shutdown()
"""


@pytest.fixture(scope="module")
def model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama", smollm2, LLAMA)


def test_an_engine_in_python_stamps_learns_and_answers_as_with_an_empty_cache(
    model, tmp_path
) -> None:
    """``sglang.Engine`` has no HTTP; fields come in ``custom_params``."""
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    heads = [token_ids(300, seed) for seed in (1, 2, 3)]
    prompts = [heads[number % 3] + token_ids(60, 50 + number) for number in range(9)]
    done = subprocess.run(
        [sys.executable, str(script), str(model)],
        input=json.dumps(prompts),
        env={**os.environ, "CANOPY_STATUS_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("ANSWERS ")] or [""]
    assert line, done.stdout[-2000:] + done.stderr[-3000:]
    cold, warm = json.loads(line.removeprefix("ANSWERS "))
    assert [said for said, _ in warm] == [said for said, _ in cold]
    assert {found for _, found in cold} == {0}
    assert all(found >= 300 for _, found in warm[3:6]), warm
    shown = json.loads((tmp_path / "rank-0.json").read_text())
    served = {row["category"].split("/")[0]: row["requests"] for row in shown["categories"]}
    assert sum(n for name, n in served.items() if name.startswith("agent")) == 18, served


def test_sglang_serve_starts_it_too_and_its_help_shows_the_flag(tiny_model, tmp_path) -> None:
    sglang = str(Path(sys.executable).with_name("sglang"))
    command = [sglang, "serve", "--help"]  # prints before plugins load
    shown = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert "--radix-eviction {" in shown.stdout
    assert "--canopy-ttl" in shown.stdout
    port, said = free_port(), tmp_path / "serve.log"
    arguments = [*cpu_arguments(tiny_model, kv_tokens=1024), "--load-format", "dummy"]
    arguments += ["--radix-eviction-policy", "wa", "--host", "127.0.0.1", "--port", str(port)]
    with said.open("wb") as log:
        process = subprocess.Popen(
            [sglang, "serve", *arguments], stdout=log, stderr=log, start_new_session=True
        )
    try:
        until(lambda: healthy(f"http://127.0.0.1:{port}", 1.0) or process.poll(), 300)
        assert process.poll() is None, said.read_text()[-2000:]
        assert "CanopyTreeCore" in said.read_text()
    finally:
        os.killpg(process.pid, 9)
        process.wait()


CHAT = "/sglang.runtime.v1.SglangService/ChatComplete"


def chat(port: int, body: dict[str, Any]) -> bytes:
    """Return the answer to an OpenAI chat body, which is the request's only field."""
    import grpc

    raw = json.dumps(body).encode()
    size, length = len(raw), b""
    while size >= 0x80:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream(
            CHAT, request_serializer=lambda given: given, response_deserializer=lambda got: got
        )
        return b"".join(call(b"\x0a" + length + bytes([size]) + raw, timeout=120))


def test_chats_over_grpc_are_stamped_and_their_answers_unchanged(server, model) -> None:
    pytest.importorskip("grpc")
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Plan a walk. " * 30}],
        "max_tokens": 6,
        "temperature": 0,
        "custom_params": FIELDS,
    }
    port = free_port()
    options = ("--grpc-port", str(port), "--radix-eviction", "wa")
    with server(model, *options, kv_tokens=1024) as client:
        cold = client.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
        client.flush()
        for _ in range(2):
            assert json.dumps(cold).strip('"').encode() in chat(port, body)
        own = {"generate": 1}  # the server's own warm-up
        until(lambda: client.requests_by_category() == {"agent": 3} | own)


SLOW_MACHINE = {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "120"}
"""A worker whose imports take longer than SGLang's ten seconds is killed and restarted."""


def workers_of(client: Any) -> int:
    """Count the workers that answer. The kernel chooses the worker of a connection, and an idle worker
    may take all, so many requests are sent at once until both have answered."""
    found: set[int] = set()
    with ThreadPoolExecutor(32) as pool:
        for _ in range(20):
            found |= set(pool.map(lambda _: client.status()["process"], range(64)))
            if len(found) == 2:
                break
    return len(found)


def test_two_workers_make_equal_stamps_and_accept_hints(server, model) -> None:
    flags = ("--tokenizer-worker-num", "2", "--radix-eviction", "wa")
    heads = [token_ids(200, seed) for seed in (1, 2, 3)]
    prompts = [heads[n % 3] + token_ids(9, 50 + n) for n in range(24)]

    def one(number: int, **body: Any) -> list[int]:
        fields = {**FIELDS, "canopy_conversation": f"c{number}"}
        return client.generate(prompts[number], 6, fields, **body)["output_ids"]

    with server(model, *flags, kv_tokens=2048, environment=SLOW_MACHINE) as client:
        cold = [one(number, extra_key=f"cold {number}") for number in range(24)]
        with ThreadPoolExecutor(8) as pool:  # each connection is one of the workers'
            assert list(pool.map(one, range(24))) == cold
        assert workers_of(client) == 2
        until(lambda: agents(client) >= 48)
        for turn in range(4):  # a connection may reach any worker
            old, ended = token_ids(500, 31 + 10 * turn), token_ids(500, 32 + 10 * turn)
            client.flush()
            client.generate(old, custom_params={"canopy_conversation": f"old{turn}"})
            client.generate(ended, custom_params={"canopy_conversation": f"ended{turn}"})
            client.post("/canopy/hint", {"conversation": f"ended{turn}", "over": True})
            time.sleep(2.0)  # the other worker's next request could overtake the hint
            client.generate(token_ids(1400, 33 + 10 * turn))
            assert client.cached(old)["total"] > 400
        # Only at the end: a further request makes its client's hint wrong, and the client loses trust.
        assert client.cached(ended)["total"] < 250
        assert "Traceback" not in client.server.log_text()


def agents(client: Any) -> int:
    """Return the number of requests with fields."""
    rows = client.requests_by_category().items()
    return sum(requests for name, requests in rows if name.startswith("agent"))
