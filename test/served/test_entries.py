"""Other entries: ``sglang.Engine``, ``sglang serve``, SGLang's gRPC port, several tokenizer workers; and every
documented flag and value on a server with warm-up and probes, stopped by SIGTERM.
"""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from canopy_documents.plugin.entry import FLAG as DOCUMENTS_FLAG
from launch_server import free_port
from sglang_canopy.config.whatif import OBSERVE_FLAG, WHATIF_FLAG
from sglang_canopy.declared import declared_fields
from sglang_canopy.policy.registry import AUTO
from sglang_canopy.server.start.flags import FLAG_CLASSES
from support.prompts import token_ids
from support.served import wait_until
from support.small_models import LLAMA, write_model

pytestmark = pytest.mark.long
AGENT_FIELDS = {"canopy_category": "agent", "canopy_turn": 2}
ENGINE_PROGRAM = """
import json, pathlib, os, sys, time, sglang
if __name__ == "__main__":
    engine = sglang.Engine(
        model_path=sys.argv[1], device="cpu", dtype="float32", max_total_tokens=2048,
        disable_overlap_schedule=True, radix_eviction_policy="wa", enable_cache_report=True,
    )
    def answer_of(prompt):
        fields = {"canopy_category": "agent", "canopy_turn": 2}
        sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True, "custom_params": fields}
        answer = engine.generate(input_ids=prompt, sampling_params=sampling)
        return answer["output_ids"], answer["meta_info"]["cached_tokens"]
    prompts, cold = json.loads(sys.stdin.read()), []
    for prompt in prompts:
        engine.flush_cache()
        cold.append(answer_of(prompt))
    engine.flush_cache()
    warm = [answer_of(prompt) for prompt in prompts]
    status_file = pathlib.Path(os.environ["CANOPY_STATUS_DIR"], "rank-0.json")
    while sum(  # it is written once a second
        row["requests"] for row in json.loads(status_file.read_text())["categories"]
    ) < 2 * len(prompts):
        time.sleep(0.1)
    print("ANSWERS " + json.dumps([cold, warm]), flush=True)
    engine.shutdown()
"""


@pytest.fixture(scope="module")
def model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama", smollm2, LLAMA)


def test_an_engine_in_python_stamps_learns_and_answers_as_without_cache(model, tmp_path) -> None:
    """``sglang.Engine`` has no HTTP server; the fields are in ``custom_params``."""
    script = tmp_path / "engine.py"
    script.write_text(ENGINE_PROGRAM)
    heads = [token_ids(300, seed) for seed in (1, 2, 3)]
    prompts = [heads[number % 3] + token_ids(60, 50 + number) for number in range(9)]
    process = subprocess.run(
        [sys.executable, str(script), str(model)],
        input=json.dumps(prompts),
        env={**os.environ, "CANOPY_STATUS_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    (line,) = [text for text in process.stdout.splitlines() if text.startswith("ANSWERS ")] or [""]
    assert line, process.stdout[-2000:] + process.stderr[-3000:]
    cold, warm = json.loads(line.removeprefix("ANSWERS "))
    assert [ids for ids, _ in warm] == [ids for ids, _ in cold]
    assert {cached for _, cached in cold} == {0}
    assert all(cached >= 300 for _, cached in warm[3:6]), warm
    categories = json.loads((tmp_path / "rank-0.json").read_text())["categories"]
    agents = [row["requests"] for row in categories if row["category"].startswith("agent")]
    assert sum(agents) == 18, categories


SGLANG = str(Path(sys.executable).with_name("sglang"))


def sglang_serve(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start ``sglang serve`` in place of ``python -m sglang.launch_server``."""
    return subprocess.Popen([SGLANG, "serve", *command[3:]], **options)


def test_the_help_of_sglang_serve_shows_the_flags() -> None:
    command = [SGLANG, "serve", "--help"]  # prints before plugins load
    process = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert "--radix-eviction {" in process.stdout
    assert "--canopy-ttl" in process.stdout


CHAT_METHOD = "/sglang.runtime.v1.SglangService/ChatComplete"


def chat_over_grpc(port: int, body: dict[str, Any]) -> bytes:
    """Return the answer to an OpenAI chat body, which is the request's only field."""
    import grpc

    message = json.dumps(body).encode()
    length, varint = len(message), b""
    while length >= 0x80:
        varint += bytes([length & 0x7F | 0x80])
        length >>= 7
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream(
            CHAT_METHOD, request_serializer=lambda raw: raw, response_deserializer=lambda raw: raw
        )
        return b"".join(call(b"\x0a" + varint + bytes([length]) + message, timeout=120))


def test_chats_over_grpc_to_sglang_serve_are_stamped_and_their_answers_unchanged(launch, model):
    pytest.importorskip("grpc")
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Plan a walk. " * 30}],
        "max_tokens": 6,
        "temperature": 0,
        "custom_params": AGENT_FIELDS,
    }
    port = free_port()
    options = ("--grpc-port", str(port), "--radix-eviction-policy", "wa")
    with launch(model, *options, kv_tokens=1024, start=sglang_serve) as client:
        cold = client.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
        client.flush()
        for _ in range(2):
            assert json.dumps(cold).strip('"').encode() in chat_over_grpc(port, body)
        warm_up = {"generate": 1}  # the server's own warm-up
        wait_until(lambda: client.requests_by_category() == {"agent": 3} | warm_up)


SLOW_MACHINE = {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "120"}
"""A worker whose imports take longer than SGLang's ten seconds is killed and restarted."""


def count_workers(client: Any) -> int:
    """Count the workers that answer. The kernel chooses the worker of a connection, and an idle worker
    may take all, so many requests are sent at once until both have answered."""
    processes: set[int] = set()
    with ThreadPoolExecutor(32) as pool:
        for _ in range(20):
            processes |= set(pool.map(lambda _: client.status()["process"], range(64)))
            if len(processes) == 2:
                break
    return len(processes)


def test_two_workers_make_equal_stamps_and_accept_hints(launch, model) -> None:
    server_flags = ("--tokenizer-worker-num", "2", "--radix-eviction", "wa")
    heads = [token_ids(200, seed) for seed in (1, 2, 3)]
    prompts = [heads[number % 3] + token_ids(9, 50 + number) for number in range(24)]

    def output_ids(number: int, **body: Any) -> list[int]:
        fields = {**AGENT_FIELDS, "canopy_conversation": f"c{number}"}
        return client.generate(prompts[number], 6, fields, **body)["output_ids"]

    with launch(model, *server_flags, kv_tokens=2048, environment=SLOW_MACHINE) as client:
        cold = [output_ids(number, extra_key=f"cold {number}") for number in range(24)]
        with ThreadPoolExecutor(8) as pool:  # each connection is one of the workers'
            assert list(pool.map(output_ids, range(24))) == cold
        assert count_workers(client) == 2
        wait_until(lambda: count_agent_requests(client) >= 48)
        for turn in range(4):  # a connection may reach any worker
            unended, ended = token_ids(500, 31 + 10 * turn), token_ids(500, 32 + 10 * turn)
            client.flush()
            client.generate(unended, custom_params={"canopy_conversation": f"unended{turn}"})
            client.generate(ended, custom_params={"canopy_conversation": f"ended{turn}"})
            client.post("/canopy/hint", {"conversation": f"ended{turn}", "over": True})
            time.sleep(2.0)  # the other worker's next request could overtake the hint
            client.generate(token_ids(1400, 33 + 10 * turn))
            assert client.cached(unended)["total"] > 400
        # Only at the end: a further request makes its client's hint wrong, and the client loses trust.
        assert client.cached(ended)["total"] < 250
        assert "Traceback" not in client.server.log_text()


def count_agent_requests(client: Any) -> int:
    """Return the number of requests that the server counts with the category of ``AGENT_FIELDS``."""
    rows = client.requests_by_category().items()
    return sum(requests for name, requests in rows if name.startswith("agent"))


TTL_JSON = json.dumps({"residual_ttl_s": 3600, "categories": {"rag": 60}})
FLAG_VALUES = {
    "--canopy-host-eviction": ("canopy-lru", "wa,min_samples=30"),
    "--canopy-disk-eviction": ("wa", "canopy-lru"),
    "--canopy-ttl": (TTL_JSON,),
    "--canopy-host-ttl": (TTL_JSON,),
    "--canopy-host-gb": ("0.02",),
    "--canopy-disk": ("tenant_quota_gb=1",),
    "--canopy-drain-s": ("25", "0"),
    "--canopy-session-gate": ("auto", "off"),
    WHATIF_FLAG: ("auto", "wa,canopy-lru,capacity=1:4", "auto,floor=off"),
    DOCUMENTS_FLAG: ("on", "off", "separator=###,ratio=0.3"),
}
"""Values of flags without choices."""
TIER_FLAGS = (
    *("--enable-hierarchical-cache", "--hicache-storage-backend", "canopy"),
    *("--page-size", "1"),
)


def flags_of(value_number: int, *flag_classes: type) -> list[str]:
    """Return all flags of ``flag_classes``, each with its value number ``value_number`` (modulo their count)."""
    values_by_flag: dict[str, str | None] = {}
    for flag_class in flag_classes:
        for field, option in declared_fields(flag_class):
            values = option.choices or FLAG_VALUES.get(option.flag, ())
            assert values or "bool" in str(field.type), f"give values of {option.flag}"
            assert len(values) <= len(POLICIES), option.flag
            values_by_flag[option.flag] = values[value_number % len(values)] if values else None
    return [word for pair in values_by_flag.items() for word in pair if word is not None]


POLICIES = (AUTO, "wa", "etlru")
"""Each policy gets one value of every other flag; the state machines test all policies."""
FLAGS_BY_NAME = {
    name: [
        *("--radix-eviction", name, *TIER_FLAGS),
        *(DOCUMENTS_FLAG, FLAG_VALUES[DOCUMENTS_FLAG][number]),
        *(flag for flag in flags_of(number, *FLAG_CLASSES) if flag != OBSERVE_FLAG),
    ]
    for number, name in enumerate(POLICIES)
}
DISK_BELOW_LRU = "a disk below SGLang's lru"
FLAGS_BY_NAME[DISK_BELOW_LRU] = ["--radix-eviction", "lru", *TIER_FLAGS]


@pytest.mark.parametrize("name", FLAGS_BY_NAME)
def test_every_flag_starts_serves_and_drains(launch, small_model, tmp_path, name: str) -> None:
    disk = json.dumps({"path": str(tmp_path / "disk"), "capacity_gb": 0.05})
    server_flags = [*FLAGS_BY_NAME[name], "--admin-api-key", "admin"]
    if TIER_FLAGS[0] in server_flags:
        server_flags += ["--hicache-storage-backend-extra-config", disk]
    # SGLang waits 10 s for the writes of many pages.
    prompt_tokens, kv_tokens = (5000, 16384) if name == DISK_BELOW_LRU else (300, 4096)
    with launch(small_model, *server_flags, kv_tokens=kv_tokens) as client:
        for _ in range(2):  # an idle server generates a token for each
            for probe in ("/health", "/health_generate", "/ready"):
                client.get(probe)
        with ThreadPoolExecutor(3) as pool:
            answers = [pool.submit(generate, client, prompt_tokens, number) for number in range(3)]
            os.kill(client.server.process.pid, signal.SIGTERM)
            meta_infos = [answer.result()["meta_info"] for answer in answers]
            assert [meta_info["completion_tokens"] for meta_info in meta_infos] == [200] * 3
        client.server.process.wait(timeout=120)
        log = client.server.log_text()
    assert "Traceback" not in log
    assert "Force exiting" not in log


def generate(client: Any, prompt_tokens: int, seed: int) -> dict[str, Any]:
    return client.generate(token_ids(prompt_tokens, seed), 200, cache_salt="tenant")
