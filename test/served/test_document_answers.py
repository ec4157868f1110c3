"""Reuse of documents in real servers: exact at ratio 1, on every route, separate by tenant."""

import functools
import itertools
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from canopy_documents.calibration import served
from canopy_lab.cli.main import main
from support.document_client import (
    DOCUMENT_TOKENS,
    ORDERS,
    QUESTION_TOKENS,
    REUSE_FLAG,
    counters_of,
    prompt_of,
    query,
    report_of,
    send_and_encode,
    tokens,
    wait_until_encoded,
)
from support.served import body_of, wait_until

pytestmark = pytest.mark.xdist_group("documents")
MAX_TEST_S = 600.0
"""Longer than a test takes, shorter than the time since 1970 or since the machine's start."""
FACTS = [f"The {noun} of the {owner} is {number}." for noun, owner, number in zip(["colour", "name", "size"] * 3,
         ["river", "lamp", "king", "town", "fox", "ship", "wall", "coat", "star"], range(9))]  # fmt: skip


def test_a_second_prompt_reuses_documents_in_another_order(client) -> None:
    send_and_encode(client, [(0, 1, 2, 3)])
    fused_before = counters_of(client)["fused_requests"]
    answer = query(client, *prompt_of((2, 0, 3, 1), 1))
    reuse = report_of(answer)
    assert reuse["fused"]
    assert reuse["reused"] + reuse["recomputed"] == 4 * DOCUMENT_TOKENS
    assert reuse["recomputed"] == int(0.15 * 4 * DOCUMENT_TOKENS)
    assert reuse["reused_host"] == reuse["reused"]
    assert reuse["missing_documents"] == 0
    assert answer["meta_info"]["cached_tokens"] == reuse["prefix"] == 0  # no exact KV
    assert reuse["kept"] == 0
    assert counters_of(client)["fused_requests"] == fused_before + 1
    # The page shows the status.
    wait_until(lambda: client.status()["documents"]["fused_requests"] == fused_before + 1)


def test_full_recompute_answers_as_plain_serving_token_for_token(client) -> None:
    client.flush()  # with exact KV of all four documents nothing is fused
    send_and_encode(client, [(0, 1, 2, 3)])
    orders = random.Random(0).sample(list(itertools.permutations(range(4))), 10)
    jobs = [prompt_of(order, i) for i, order in enumerate(orders)]
    with ThreadPoolExecutor(4) as pool:
        fused = list(pool.map(lambda job: query(client, *job, 8, canopy_recompute_ratio=1.0), jobs))
        plain = list(pool.map(lambda job: query(client, job[0], "off", 8), jobs))
    assert all(report_of(a)["fused"] and report_of(a)["reused"] == 0 for a in fused)
    assert [answer["output_ids"] for answer in fused] == [answer["output_ids"] for answer in plain]


def test_requests_that_cannot_be_fused_run_normally_and_are_counted(client) -> None:
    send_and_encode(client, [(0, 1, 2, 3)])
    ids, bounds = prompt_of((1, 3, 0, 2), 3)
    sampling_params = {"temperature": 0, "max_new_tokens": 2}
    sampling_params["custom_params"] = {"canopy_document_bounds": bounds}
    body = {"input_ids": ids, "sampling_params": sampling_params}
    body |= {"return_logprob": True, "logprob_start_len": 0}
    answer = client.post("/generate", body)
    assert not report_of(answer)["fused"]
    assert report_of(answer)["why"] == "prompt logprobs"
    assert counters_of(client)["not_fused"]["prompt logprobs"] >= 1
    other_ids, _ = prompt_of((0, 3, 1, 2), 4)  # the other prompt is in the exact tree now
    body |= {"input_ids": other_ids, "logprob_start_len": -1, "top_logprobs_num": 2}
    assert report_of(client.post("/generate", body))["fused"]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("bounds", [[10, 50, 30, 80], [0, 10_000], "yes"])
def test_bad_bounds_get_400_and_the_server_continues(client, bounds, is_streamed) -> None:
    params = {"max_new_tokens": 1, "custom_params": {"canopy_document_bounds": bounds}}
    body = {"sampling_params": params, "stream": is_streamed}
    code, text = client.send("/generate", {"input_ids": tokens(200, 1), **body})
    assert code == 400
    assert "canopy_document_bounds" in text
    code, text = client.send("/generate", {"text": "Bounds count tokens.", **body})
    assert code == 400
    assert "canopy_document_bounds" in text
    assert client.generate(tokens(10, 2), 1)["output_ids"]


def messages_of(texts) -> list[dict]:
    parts = [{"type": "text", "text": text} for text in (*texts, "What is the size of the king?")]
    return [{"role": "user", "content": parts}]


def chat_report(client, messages, **custom_params) -> tuple[dict, dict]:
    """Return the report of reuse and the usage of a chat."""
    body = {"model": "m", "max_tokens": 1, "messages": messages, "return_meta_info": True}
    answer = client.post("/v1/chat/completions", {**body, "custom_params": custom_params})
    (choice,) = answer["choices"]
    return choice["meta_info"]["canopy_documents"][0], answer["usage"]


PART_DOCUMENTS = {"canopy_documents": "parts"}


def test_text_parts_of_a_chat_are_documents_on_request(client) -> None:
    texts = [f"{fact} Nobody knows why, and nobody asks any more these days." * 2 for fact in FACTS]
    first_report, usage = chat_report(client, messages_of(texts[:4]), **PART_DOCUMENTS)
    assert not first_report["fused"]
    assert first_report["why"] == "too few of its documents are stored"
    wait_until_encoded(client)
    reordered = messages_of([texts[i] for i in (3, 1, 0, 2)])
    second_report, second_usage = chat_report(client, reordered, **PART_DOCUMENTS)
    assert second_report["reused"] > second_report["recomputed"] > 0
    assert second_usage["prompt_tokens"] == usage["prompt_tokens"]
    body = {"model": "m", "max_tokens": 1, "messages": reordered}
    plain_tokens = client.post("/v1/chat/completions", body)["usage"]["prompt_tokens"]
    assert plain_tokens == usage["prompt_tokens"]


def test_an_agent_keeps_its_exact_prefix_at_its_first_tool_results(client) -> None:
    history = [
        {"role": "system", "content": "You are an agent. " + " ".join(FACTS * 4)},
        {"role": "user", "content": "Find the oldest lamp of the town."},
    ]
    previous_tokens = 0
    for number in range(3):
        answer = client.post(
            "/v1/chat/completions",
            {"model": "m", "max_tokens": 2, "messages": history, "custom_params": PART_DOCUMENTS},
        )
        cached_tokens = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        assert cached_tokens >= previous_tokens - 16
        previous_tokens = answer["usage"]["prompt_tokens"]
        call = {"id": f"{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        text = f"Result {number}: " + "the lamp was seen at the old mill by the sea, " * 4
        history += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"{number}", "content": text},
        ]


TOKEN_FIELDS = {
    "/generate": "prompt_tokens",
    "/v1/completions": "prompt_tokens",
    "/v1/chat/completions": "prompt_tokens",
    "/v1/messages": "input_tokens",
    "/v1/responses": "input_tokens",
    "/api/chat": "prompt_eval_count",
    "/api/generate": "prompt_eval_count",
}
"""Path -> the name of the number of a prompt's tokens in an answer."""


def request_of(client, path: str, text: str) -> dict[str, Any]:
    (model,) = json.loads(client.get("/v1/models"))["data"]
    return body_of(path, text, model["id"])


@pytest.mark.parametrize("path", TOKEN_FIELDS)
def test_separated_documents_are_reused_on_every_route(client, path) -> None:
    texts = [f"{path}: {fact} It was seen at the old mill by the sea." * 3 for fact in FACTS[:3]]

    def send(texts) -> int:
        text = " # # ".join(["Read.", *texts, "What is it?"])
        answer = client.post(path, {"stream": False, **request_of(client, path, text)})
        return (answer.get("usage") or answer.get("meta_info") or answer)[TOKEN_FIELDS[path]]

    prompt_tokens = send(texts)
    wait_until_encoded(client)
    fused_before = counters_of(client)["fused_requests"]
    assert send(texts[::-1]) == prompt_tokens
    counters = counters_of(client)
    assert counters["fused_requests"] == fused_before + 1, counters


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_documents_in_a_field_that_no_route_reads_are_refused(client, path, is_streamed) -> None:
    fields = {"stream": is_streamed, "documents": FACTS[:2]}
    code, text = client.send(path, fields | request_of(client, path, "What is it?"))
    assert (code, "text parts" in text) == (400, True)


def test_deleting_a_tenants_documents_reaches_the_tree_and_the_store(client) -> None:
    for tenant in ("a", "b"):
        send_and_encode(client, [(0, 1, 2, 3)], extra_key=tenant)
        assert report_of(query(client, *prompt_of((2, 0, 3, 1), 1), extra_key=tenant))["fused"]
    deleted = client.send("/canopy/documents?extra_key=a", method="DELETE")
    assert (deleted.code, json.loads(deleted.text)) == (200, {"deleted": True})
    answer = query(client, *prompt_of((2, 0, 3, 1), 1), 1, extra_key="a")
    assert (report_of(answer)["fused"], report_of(answer)["missing_documents"]) == (False, 4)
    assert answer["meta_info"]["cached_tokens"] == 0
    assert report_of(query(client, *prompt_of((3, 1, 2, 0), 1), 1, extra_key="b"))["fused"]


@pytest.mark.long
def test_tensor_parallel_ranks_reuse_the_same_documents(launch, tiny_model) -> None:
    # SGLang needs this if a rank has no NUMA node of its own.
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
    with launch(tiny_model, *REUSE_FLAG, "--tp", "2", kv_tokens=8192, environment=cores) as client:
        send_and_encode(client, [(0, 1, 2, 3)])  # in idle time; only the first rank detects its end
        jobs = [prompt_of(order, i) for i, order in enumerate(ORDERS)]
        with ThreadPoolExecutor(4) as pool:
            reused = list(pool.map(lambda job: query(client, *job, 4), jobs))
        assert all(report_of(answer)["reused"] > 2 * DOCUMENT_TOKENS for answer in reused)
        for (ids, bounds), answer in zip(jobs, reused):
            longer_ids = ids + answer["output_ids"] + tokens(QUESTION_TOKENS, 600)
            turn = query(client, longer_ids, bounds, 4)
            assert report_of(turn)["computed"] == QUESTION_TOKENS + 1  # from kept KV
        assert counters_of(client)["fallbacks"] == 0
        for ids, bounds in jobs:
            exact = query(client, ids, bounds, 8, canopy_recompute_ratio=1.0)
            assert report_of(exact)["fused"]
            assert exact["output_ids"] == query(client, ids, "off", 8)["output_ids"]


def test_a_recompute_ratio_is_calibrated_through_the_server(client, tmp_path, monkeypatch) -> None:
    result_path = tmp_path / "calibration.json"
    workload = {"prompts": 2, "repeats": 1, "documents": 4, "document_tokens": 64}
    small_prompts = functools.partial(served.ServedPrompts, **workload)
    monkeypatch.setattr(served, "ServedPrompts", small_prompts)
    assert main(["documents", "calibrate", "--url", client.url, "--out", str(result_path)]) == 0
    (calibration,) = json.loads(result_path.read_text()).values()
    assert 0.15 <= calibration["ratio"] <= 1.0
    measured_on = tuple(calibration[key] for key in ("tier", "backend", "dtype"))
    assert measured_on == ("memory", "torch_native", "float32")


def named_numbers(answer: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield each number with the name of its nearest key."""
    if isinstance(answer, (dict, list)):
        items = answer.items() if isinstance(answer, dict) else ((name, item) for item in answer)
        for key, value in items:
            yield from named_numbers(value, key)
    elif isinstance(answer, (int, float)) and not isinstance(answer, bool):
        yield name, answer


def test_times_in_answers_are_named_as_documented(client) -> None:
    """``_unix_s`` is a time since 1970, ``_ago_s`` an age, and no other number is a time of a clock."""
    for seed in range(6):
        params = {"canopy_conversation": f"c{seed % 2}", "canopy_turn": 1 + seed // 2}
        client.generate(tokens(700, seed), 4, params)
    path = "/canopy/explain?conversation=c0"
    wait_until(lambda: '"cached"' in client.send(path).text)
    time.sleep(0.5)  # the route answers once in that time, for all users together
    unix_s, monotonic_s = time.time(), time.monotonic()
    number_names = set()
    for name, value in named_numbers([client.status(), json.loads(client.get(path))]):
        number_names.add(name)
        assert (abs(value - unix_s) < MAX_TEST_S) == name.endswith("_unix_s"), (name, value)
        assert not name.endswith("_ago_s") or 0.0 <= value < MAX_TEST_S, (name, value)
        # A whole number may be a bound of that size.
        is_monotonic_time = abs(value - monotonic_s) < MAX_TEST_S / 10 and value % 1
        assert not is_monotonic_time, (name, value)
    assert {"time_unix_s", "clock_ago_s", "last_use_ago_s"} <= number_names
