"""A real server with Canopy: text, batches, hints, bad input, measured times."""

import http.client
from typing import Any

import pytest

from canopy_lab.cli.main import main
from canopy_lab.sim.system import SystemConfig, load_profile, simulate_system
from canopy_lab.trace.record import TraceRequest
from support.prompts import token_ids
from support.served import greedy_ids

pytestmark = pytest.mark.xdist_group("canopy")


def test_greedy_text_with_a_cache_equals_that_of_transformers(canopy_server, small_model) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(small_model))
    story = "Once upon a time there was a small lighthouse on a rock in the sea. " * 8
    prompts = [tokenizer(story + end)["input_ids"] for end in ("Its keeper", "At night", "One day")]
    prompts += [prompts[0] + tokenizer(" was old. He")["input_ids"], prompts[1]]
    answers = [canopy_server.generate(prompt, 16) for prompt in prompts]
    cached_tokens = [answer["meta_info"]["cached_tokens"] for answer in answers]
    assert cached_tokens[0] <= 100 < min(cached_tokens[1:])
    assert [answer["output_ids"] for answer in answers] == greedy_ids(small_model, prompts, 16)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [-5]}),
        ("/generate", {"input_ids": [[1, 2], [3, 10**6]]}),
        ("/v1/completions", {"model": "m", "prompt": [4, -1]}),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{}]}),
    ],
)
def test_prompts_that_cannot_be_computed_are_errors_and_the_server_continues(
    canopy_server, path, body, is_streamed
) -> None:
    """Some errors are SGLang's own: a 500, an error in a stream, or a stream that breaks."""
    try:
        code, text = canopy_server.send(path, {**body, "stream": is_streamed})
    except http.client.IncompleteRead:
        code, text = 500, ""
    assert code >= 400 or '"error"' in text, text
    assert canopy_server.generate(token_ids(5, seed=1))["output_ids"]


def test_a_hint_is_accepted_and_the_status_reports_it(canopy_server) -> None:
    client = canopy_server
    assert client.post("/canopy/hint", {"conversation": "c-1", "over": True}) == {"waiting": 1}
    code, text = client.send("/canopy/hint", {"conversation": "c-1"})
    assert (code, "one of" in text) == (400, True)
    for seed in range(30):
        client.generate(token_ids(20 + 10 * seed, seed=500 + seed))
    status = client.status()
    assert (status["policy"], status["hints_waiting"]) == ("wa", 0)
    assert status["ttft_model"]["requests"] >= 30
    # A busy machine's times may show no line; a falling line would be wrong.
    slope_ms = status["ttft_model"]["alpha_ms_per_1k_tokens"]
    assert slope_ms is None or slope_ms > 0


KV_HINTS = {
    "protocol_version": "0.1",
    "message_id": "m",
    "actions": [
        {"action_id": action, "action_type": action, "action_version": "1.0", "payload": {}}
        for action in ("kv.release", "kv.fetch")
    ],
}


@pytest.mark.parametrize(
    ("seed", "fields"),
    [(31, {"custom_params": {"canopy_conversation": "ended"}}), (41, {"kv_hints": KV_HINTS})],
)
def test_kv_of_a_conversation_ended_by_a_hint_is_evicted_first(canopy_server, seed, fields) -> None:
    client = canopy_server
    unended, ended = token_ids(500, seed=seed), token_ids(500, seed=seed + 1)
    ignored_before = client.status()["ignored_fields"].get("kv_hints", 0)
    client.generate(unended, custom_params={"canopy_conversation": "unended"})
    client.generate(ended, **fields)
    if "kv_hints" not in fields:
        client.post("/canopy/hint", {"conversation": "ended", "over": True})
    client.generate(token_ids(1400, seed=seed + 2))
    assert client.cached(unended)["total"] > 400
    assert client.cached(ended)["total"] < 250
    ignored_after = client.status()["ignored_fields"].get("kv_hints", 0)
    assert ignored_after == ignored_before + ("kv_hints" in fields)  # ``kv.fetch``


PROCESSOR_SOURCE = """
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

class Biases(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list or []):
            if params is None:
                logits[row, 555] += 1000.0
            for key, value in (params or {}).items():
                if key != "__req__":
                    logits[row, int(key)] += float(value)
        return logits
"""
"""A processor whose parameters are token ids and biases: any other key ends the scheduler."""


def test_a_logit_processor_receives_its_clients_parameters_alone(canopy_server) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}  # a server cannot import this file
    exec(PROCESSOR_SOURCE, namespace)
    body = {"input_ids": token_ids(50, 1), "custom_logit_processor": namespace["Biases"].to_str()}
    biases, stamp = {"777": 1000.0}, {"canopy_category": "chat", "canopy_turn": 2}

    def output_ids(params: dict[str, Any] | None, **sampling: Any) -> list[int]:
        sampling_params = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True, **sampling}
        if params is not None:
            sampling_params["custom_params"] = params
        answer = canopy_server.post("/generate", {**body, "sampling_params": sampling_params})
        return (answer[0] if isinstance(answer, list) else answer)["output_ids"]

    assert output_ids(biases) == output_ids({**biases, **stamp}) == [777] * 2
    assert output_ids(None) == [555] * 2
    assert output_ids(biases, n=2, temperature=1.0) == [777] * 2
    assert output_ids({}) != [555] * 2
    assert "Scheduler hit an exception" not in canopy_server.server.log_text()


def test_a_measured_profile_simulates(canopy_server, small_model, tmp_path, capsys) -> None:
    profile_file = tmp_path / "profile.json"
    limits = ["--max-prompt-tokens", "256", "--max-context-tokens", "256", "--max-batch", "2"]
    command = ["profile", "--url", canopy_server.url, "--out", str(profile_file), "--repeats", "1"]
    assert main([*command, *limits]) == 0
    assert "prefill of" in capsys.readouterr().out
    profile = load_profile(profile_file)
    assert profile.source == "measured"
    assert profile.kv_bytes_per_token == 2 * 2 * 2 * 32 * 4  # k and v, layers, heads, size, float32
    assert profile.layers == 1  # on a CPU no copy overlaps compute
    trace = [TraceRequest(0.0, 128, 8, tuple(range(8)), 16)]
    result = simulate_system(trace, SystemConfig(device_tokens=4096), profile)
    assert 0 < result.mean_ttft_s < result.mean_e2e_s
