"""A real server with Canopy: both ways to start, hints, bad input, load."""

import json
import os
import subprocess
import sys
import urllib.error
from pathlib import Path

import pytest

from launch_server import cpu_arguments, free_port, healthy
from sglang_canopy.errors import CanopyError
from support.prompts import token_ids

ROOT = Path(__file__).resolve().parents[2]
WA = ("--radix-eviction", "wa")
pytestmark = pytest.mark.xdist_group("canopy")


def refused(client, path: str, body: dict) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as answer:
        client.post(path, body)
    return answer.value.code, answer.value.read().decode()


def test_a_prefix_is_found_again_and_the_pool_evicts(canopy_server):
    client = canopy_server
    prompt = token_ids(600, seed=1)
    assert client.cached(prompt)["total"] == 0
    assert client.cached(prompt + token_ids(20, seed=2))["total"] == 600
    for seed in range(3, 9):
        client.generate(token_ids(600, seed))
    assert client.cached(prompt)["total"] < 600
    log = client.server.log_text()
    assert "CanopyTreeCore" in log
    assert "Traceback" not in log


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "said",
    [
        {"canopy_category": "x" * 1_000_000},
        {"canopy_turn": -4},
        {"canopy_turn": 10**30},
        {"canopy_conversation": 12},
        {"canopy": {"time": 1}},
        {"canopy_nonsense": 1},
        "not an object",
        [1],
    ],
)
def test_bad_input_gets_400_and_the_server_continues(canopy_server, said, stream):
    client = canopy_server
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    given = {"custom_params": said, "stream": stream}
    code, text = refused(client, "/v1/chat/completions", {**chat, **given})
    assert code == 400
    assert "custom_params" in text
    code, _ = refused(client, "/v1/completions", {"model": "m", "prompt": "hi", **given})
    assert code == 400
    sampling = {"max_new_tokens": 2, "custom_params": said}
    body = {"sampling_params": sampling, "stream": stream}
    code, _ = refused(client, "/generate", {"text": "hi", **body})
    assert code == 400
    code, _ = refused(client, "/generate", {"text": ["a", "b"], **body})
    assert code == 400
    body["sampling_params"] = [{"max_new_tokens": 2}, sampling]
    code, _ = refused(client, "/generate", {"text": ["a", "b"], **body})
    assert code == 400
    assert client.post("/v1/chat/completions", chat)["choices"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/generate", {"input_ids": [-5]}, "the token -5"),
        ("/generate", {"input_ids": [[1, 2], [3, 10**6]]}, "the token 1000000"),
        ("/v1/completions", {"model": "m", "prompt": [4, -1]}, "the token -1"),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{}]}, "a list of 1 for 2 prompts"),
    ],
)
def test_prompts_that_cannot_be_computed_get_400_and_the_server_continues(
    canopy_server, path, body, said, stream
):
    client = canopy_server
    code, text = refused(client, path, {**body, "stream": stream})
    assert code == 400
    assert said in text
    assert client.generate(token_ids(5, seed=1))["output_ids"]


def test_unknown_categories_are_served_and_stay_bounded(canopy_server):
    client = canopy_server
    for i in range(80):
        said = {"canopy_category": f"never-seen-{i}", "canopy_turn": i + 1}
        client.generate(token_ids(20, seed=100 + i), custom_params=said)
    assert "Traceback" not in client.server.log_text()


def test_the_openai_client_can_send_hints(canopy_server):
    openai = pytest.importorskip("openai")
    client = canopy_server
    api = openai.OpenAI(base_url=f"{client.url}/v1", api_key="none")
    said = {
        "canopy_category": "agent",
        "canopy_conversation": "c-17",
        "canopy_turn": 2,
        "canopy_stop": "tool",
        "canopy_return_in_s": 12,
    }
    messages = [{"role": "user", "content": "Plan a walk. " * 30}]
    first = api.chat.completions.create(
        model="m", messages=messages, max_tokens=4, extra_body={"custom_params": said}
    )
    again = api.chat.completions.create(model="m", messages=messages, max_tokens=4)
    assert first.usage.prompt_tokens_details.cached_tokens < 32
    assert again.usage.prompt_tokens_details.cached_tokens > 50


def test_a_hint_and_the_status_have_routes_of_their_own(canopy_server):
    client = canopy_server
    assert client.post("/canopy/hint", {"conversation": "c-1", "over": True}) == {"waiting": 1}
    code, text = refused(client, "/canopy/hint", {"conversation": "c-1"})
    assert code == 400
    assert "one of" in text
    client.generate(token_ids(10, seed=5))
    for seed in range(30):
        client.generate(token_ids(20 + 10 * seed, seed=500 + seed))
    status = json.loads(client.get("/canopy/status"))
    assert status["policy"] == "wa"
    assert status["hints_waiting"] == 0
    assert status["ttft_model"]["requests"] >= 30
    # A line that a busy machine's times do not show is no line; a falling one never is.
    slope = status["ttft_model"]["alpha_ms_per_1k_tokens"]
    assert slope is None or slope > 0


def test_an_ended_conversation_is_evicted_first(canopy_server):
    client = canopy_server
    old, ended = token_ids(500, seed=31), token_ids(500, seed=32)
    client.generate(old, custom_params={"canopy_conversation": "old"})
    client.generate(ended, custom_params={"canopy_conversation": "ended"})
    client.post("/canopy/hint", {"conversation": "ended", "over": True})
    client.generate(token_ids(1400, seed=33))
    assert client.cached(old)["total"] > 400
    assert client.cached(ended)["total"] < 250


@pytest.mark.long
def test_a_bad_configuration_stops_the_start_with_one_line(server, tiny_model):
    """The launcher prints the end of the server's log."""
    wrong = ("--radix-eviction-policy-config", '{"colour": 1}')
    with (
        pytest.raises(CanopyError, match="before it was ready") as stopped,
        server(tiny_model, *WA, *wrong),
    ):
        pytest.fail("the server started")
    last = str(stopped.value).strip().splitlines()[-1]
    assert last.startswith("sglang-canopy: --radix-eviction-policy-config: policy 'wa'")
    assert "unknown key 'colour'; allowed keys: " in last


@pytest.mark.long
def test_sglang_serve_starts_it_too_and_its_help_shows_the_flag(tiny_model, tmp_path):
    sglang = Path(sys.executable).with_name("sglang")
    command = [str(sglang), "serve", "--help"]  # prints before plugins load
    shown = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert "--radix-eviction {" in shown.stdout
    assert "--canopy-ttl" in shown.stdout
    port = free_port()
    arguments = [*cpu_arguments(tiny_model, kv_tokens=1024), "--load-format", "dummy"]
    arguments += ["--radix-eviction-policy", "wa", "--host", "127.0.0.1", "--port", str(port)]
    log = (tmp_path / "serve.log").open("wb")
    process = subprocess.Popen(
        [str(sglang), "serve", *arguments], stdout=log, stderr=log, start_new_session=True
    )
    try:
        deadline = 600
        while not healthy(f"http://127.0.0.1:{port}", 1.0) and deadline:
            assert process.poll() is None, (tmp_path / "serve.log").read_text()[-2000:]
            deadline -= 1
            try:
                process.wait(0.3)
            except subprocess.TimeoutExpired:
                continue
        assert deadline
        assert "CanopyTreeCore" in (tmp_path / "serve.log").read_text()
    finally:
        os.killpg(process.pid, 9)
        process.wait()
