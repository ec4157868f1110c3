"""Reuse of documents in real servers: exact at ratio 1, kept for the next turn, separate from exact KV."""

import itertools
import json
import random
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from canopy_lab.cli.main import main
from reference_docs import routes
from support.chunk_client import (
    DOCUMENT,
    ON,
    QUESTION,
    SYSTEM,
    ask,
    learn,
    prompt,
    report,
    state,
    tokens,
    wait_until_encoded,
)
from support.served import until
from support.small_models import change_config

pytestmark = pytest.mark.xdist_group("documents")
ANSWER = 6
FACTS = [f"The {a} of the {b} is {c}." for a, b, c in zip(["colour", "name", "size"] * 3,
         ["river", "lamp", "king", "town", "fox", "ship", "wall", "coat", "star"], range(9))]  # fmt: skip


@pytest.fixture
def client(shared_server, small_model):
    order = ("--canopy-session-gate", "auto", "--canopy-queue-order", "bounded-shortest")
    flags = (*ON, "--radix-eviction", "wa", *order)
    return shared_server(small_model, *flags, kv_tokens=8192)


def test_a_second_prompt_reuses_documents_in_another_order(client) -> None:
    learn(client, [(0, 1, 2, 3)])
    before = state(client)["fused_requests"]
    answer = ask(client, *prompt((2, 0, 3, 1), 1))
    told = report(answer)
    assert told["fused"]
    assert told["reused"] + told["recomputed"] == 4 * DOCUMENT
    assert told["recomputed"] == int(0.15 * 4 * DOCUMENT)
    assert told["reused_host"] == told["reused"]
    assert told["missing_chunks"] == 0
    assert answer["meta_info"]["cached_tokens"] == told["prefix"] == 0  # approximate KV is apart
    assert told["kept"] == 0
    assert state(client)["fused_requests"] == before + 1


def test_full_recompute_is_plain_serving_token_for_token(client) -> None:
    client.flush()  # with exact KV of all four documents nothing is fused
    learn(client, [(0, 1, 2, 3)])
    orders = random.Random(0).sample(list(itertools.permutations(range(4))), 10)
    prompts = [prompt(order, i) for i, order in enumerate(orders)]
    with ThreadPoolExecutor(4) as pool:
        fused = list(pool.map(lambda p: ask(client, *p, 8, canopy_recompute_ratio=1.0), prompts))
        plain = list(pool.map(lambda p: ask(client, p[0], "off", 8), prompts))
    assert all(report(f)["fused"] and report(f)["reused"] == 0 for f in fused)
    assert [f["output_ids"] for f in fused] == [p["output_ids"] for p in plain]


@pytest.fixture
def qwen3(tiny_model, tmp_path_factory):
    """The tiny model as a Qwen3: queries and keys are normed before they are rotated."""
    made = tmp_path_factory.mktemp("models") / "qwen3"
    shutil.copytree(tiny_model, made)
    kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    change_config(made, **kind, attention_bias=False)
    return made


@pytest.mark.long
def test_a_model_with_a_norm_for_each_head_is_served_exactly(shared_server, qwen3) -> None:
    client = shared_server(qwen3, *ON, kv_tokens=8192)
    learn(client, [(0, 1, 2, 3)])
    ids, bounds = prompt((2, 0, 3, 1), 1)
    assert report(ask(client, ids, bounds))["reused"] > 0
    whole = ask(client, ids, bounds, 8, canopy_recompute_ratio=1.0)
    assert report(whole)["fused"]
    assert whole["output_ids"] == ask(client, ids, "off", 8)["output_ids"]


@pytest.mark.long
def test_planned_and_ordinary_requests_do_not_change_each_other(client) -> None:
    first, orders = (0, 1, 2, 3), [(3, 2, 0, 1), (0, 3, 1, 2), (2, 1, 3, 0), (1, 0, 2, 3)]
    mixed = [prompt(order, 40 + i) for i, order in enumerate(orders)]
    plain = [tokens(150 + 20 * i, 700 + i) for i in range(len(mixed))]
    # A document is encoded once more when its head recurs, and its better KV gives other answers.
    for learnt in ([first], [first, *orders]):
        client.flush()
        learn(client, learnt)
    encoded = state(client)["encoded_chunks"]

    def one(job):
        return ask(client, *job, 8) if isinstance(job, tuple) else client.generate(job, 8)

    def answers(at_once: int) -> tuple[list, list]:
        """Answer all from the same kept KV. Returns their tokens and the reports of the mixed."""
        client.flush()
        learn(client, [first])
        with ThreadPoolExecutor(at_once) as pool:
            found = list(pool.map(one, [x for pair in zip(mixed, plain) for x in pair]))
        plans = [{**report(a), "plan_ms": 0} for a in found[::2]]
        return [a["output_ids"] for a in found], plans

    alone, plans = answers(1)
    assert all(plan["fused"] and plan["reused"] for plan in plans)
    assert answers(8) == (alone, plans)
    assert state(client)["encoded_chunks"] == encoded


def test_tenants_share_nothing(client) -> None:
    learn(client, [(0, 1, 2, 3)])
    other = ask(client, *prompt((1, 0, 2, 3)), 1, extra_key="another tenant")
    assert not report(other)["fused"]
    assert report(other)["missing_chunks"] == 4


def test_requests_that_cannot_be_fused_run_normally_and_are_counted(client) -> None:
    learn(client, [(0, 1, 2, 3)])
    ids, bounds = prompt((1, 3, 0, 2), 3)
    said = {"temperature": 0, "max_new_tokens": 2, "custom_params": {"canopy_chunks": bounds}}
    body = {
        "input_ids": ids,
        "sampling_params": said,
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = client.post("/generate", body)
    assert not report(answer)["fused"]
    assert report(answer)["why"] == "prompt logprobs"
    assert state(client)["not_fused"]["prompt logprobs"] >= 1
    fresh = prompt((0, 3, 1, 2), 4)[0]  # the other prompt is in the exact tree now
    output = {**body, "input_ids": fresh, "logprob_start_len": -1, "top_logprobs_num": 2}
    assert report(client.post("/generate", output))["fused"]


@pytest.mark.parametrize("selector", ["question", "frequency"])
def test_every_selector_serves(client, selector) -> None:
    learn(client, [(0, 1, 2, 3)])
    fused = report(ask(client, *prompt((3, 0, 2, 1), 11), 2, canopy_selector=selector))
    assert fused["fused"]
    assert 0 < fused["recomputed"] <= int(0.15 * 4 * DOCUMENT)


BAD = [[10, 50, 30, 80], [10, 10], [0, 10_000], "yes", [1, 2, 3], [-5, 7]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("bounds", BAD, ids=["overlap", "empty", "past", "word", "odd", "negative"])
def test_bad_bounds_get_400_and_the_server_continues(client, bounds, stream) -> None:
    params = {"max_new_tokens": 1, "custom_params": {"canopy_chunks": bounds}}
    body = {"sampling_params": params, "stream": stream}
    code, text = client.send("/generate", {"input_ids": tokens(200, 1), **body})
    assert code == 400
    assert "canopy_chunks" in text
    code, text = client.send("/generate", {"text": "Bounds count tokens.", **body})
    assert code == 400
    assert "canopy_chunks" in text
    assert client.generate(tokens(10, 2), 1)["output_ids"]


def test_a_separator_marks_documents_in_a_completion(client) -> None:
    documents = [f"{f} It was built by hand, long ago, near the old market." * 2 for f in FACTS[:4]]
    body = {"model": "m", "max_tokens": 2, "temperature": 0}
    text = " # # ".join(["You know things.", *documents, "What is it?"])
    client.post("/v1/completions", {**body, "prompt": text})
    while state(client)["waiting_chunks"]:
        pass
    before = state(client)
    turned = " # # ".join(["You know things.", *reversed(documents), "What is it?"])
    client.post("/v1/completions", {**body, "prompt": turned})
    after = state(client)
    assert after["fused_requests"] == before["fused_requests"] + 1
    declined = {"canopy_chunks": "off"}
    client.post("/v1/completions", {**body, "prompt": text, "custom_params": declined})
    assert state(client)["fused_requests"] == after["fused_requests"]


def parts_of(texts, question="What is the size of the king?") -> list[dict]:
    parts = [{"type": "text", "text": text} for text in (*texts, question)]
    return [{"role": "user", "content": parts}]


def chat_report(client, messages, **custom) -> tuple[dict, dict]:
    """The report and the usage of a chat."""
    body = {"model": "m", "max_tokens": 1, "messages": messages, "return_meta_info": True}
    answer = client.post("/v1/chat/completions", {**body, "custom_params": custom})
    (choice,) = answer["choices"]
    return choice["meta_info"]["canopy_chunks"][0], answer["usage"]


PARTS = {"canopy_documents": "parts"}


def test_text_parts_of_a_chat_are_documents_on_request(client) -> None:
    texts = [f"{f} Nobody knows why, and nobody asks any more in these days." * 2 for f in FACTS]
    first, usage = chat_report(client, parts_of(texts[:4]), **PARTS)
    assert (first["fused"], first["why"]) == (False, "too few of its documents are stored")
    wait_until_encoded(client)
    turned = parts_of([texts[i] for i in (3, 1, 0, 2)])
    told, same = chat_report(client, turned, **PARTS)
    assert told["reused"] > told["recomputed"] > 0
    assert same["prompt_tokens"] == usage["prompt_tokens"]
    body = {"model": "m", "max_tokens": 1, "messages": turned}
    plain = client.post("/v1/chat/completions", body)["usage"]["prompt_tokens"]
    assert plain == usage["prompt_tokens"]


def test_an_agent_keeps_its_exact_prefix_at_its_first_tool_results(client) -> None:
    history = [
        {"role": "system", "content": "You are an agent. " + " ".join(FACTS * 4)},
        {"role": "user", "content": "Find the oldest lamp of the town."},
    ]
    held = 0
    for number in range(3):
        answer = client.post(
            "/v1/chat/completions",
            {"model": "m", "max_tokens": 2, "messages": history, "custom_params": PARTS},
        )
        cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        assert cached >= held - 16
        held = answer["usage"]["prompt_tokens"]
        call = {"id": f"{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        text = f"Result {number}: " + "the lamp was seen at the old mill by the sea, " * 4
        history += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"{number}", "content": text},
        ]


def test_very_many_documents_are_served_normally(client) -> None:
    texts = [f"The lamp number {i} of the town" for i in range(300)]
    told, _ = chat_report(client, parts_of(texts), **PARTS)
    assert (told["fused"], told["why"]) == (False, "more than 256 documents")
    bounds = [x for i in range(300) for x in (2 * i, 2 * i + 2)]
    assert report(ask(client, tokens(700, 3), bounds, 1))["why"] == "more than 256 documents"


def stuffed(texts) -> list[dict]:
    """Return the messages of LangChain's chain."""
    return [{"role": "user", "content": " # # ".join(["Answer.", *texts, "What is it?"])}]


def tool_results(texts) -> list[dict]:
    messages = [{"role": "user", "content": "What is it?"}]
    for i, text in enumerate(texts):
        call = {"id": f"{i}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"{i}", "content": text})
    return messages


@pytest.mark.parametrize("said", [stuffed, tool_results])
def test_documents_of_client_libraries_are_reused(client, said) -> None:
    texts = [f"{said.__name__}: {f} It was seen at the old mill by the sea." * 2 for f in FACTS[:3]]

    assert chat_report(client, said(texts), **PARTS)[0]["missing_chunks"] == 3
    wait_until_encoded(client)
    told, _ = chat_report(client, said(texts[::-1]), **PARTS)
    assert told["reused"] > told["recomputed"] > 0


def chat(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


OF_ROUTES = {
    "/generate": (
        lambda text: {"text": text, "sampling_params": {"max_new_tokens": 1}},
        lambda answer: answer["meta_info"]["prompt_tokens"],
    ),
    "/v1/completions": (
        lambda text: {"prompt": text, "max_tokens": 1},
        lambda answer: answer["usage"]["prompt_tokens"],
    ),
    "/v1/chat/completions": (
        lambda text: {"messages": chat(text), "max_tokens": 1},
        lambda answer: answer["usage"]["prompt_tokens"],
    ),
    "/v1/messages": (
        lambda text: {"messages": chat(text), "max_tokens": 1},
        lambda answer: answer["usage"]["input_tokens"],
    ),
    "/v1/responses": (
        lambda text: {"input": text, "max_output_tokens": 2},
        lambda answer: answer["usage"]["input_tokens"],
    ),
    "/api/chat": (
        lambda text: {"messages": chat(text), "options": {"num_predict": 1}},
        lambda answer: answer["prompt_eval_count"],
    ),
    "/api/generate": (
        lambda text: {"prompt": text, "options": {"num_predict": 1}},
        lambda answer: answer["prompt_eval_count"],
    ),
}
"""Path -> the body of a text, and the number of tokens of an answer's prompt."""


@pytest.mark.parametrize("path", OF_ROUTES)
def test_separated_documents_are_reused_on_every_route(client, path) -> None:
    body, prompt_tokens = OF_ROUTES[path]
    (model,) = json.loads(client.get("/v1/models"))["data"]
    texts = [f"{path}: {f} It was seen at the old mill by the sea." * 3 for f in FACTS[:3]]

    def send(texts) -> int:
        text = " # # ".join(["Read.", *texts, "What is it?"])
        return prompt_tokens(
            client.post(path, {"model": model["id"], "stream": False, **body(text)})
        )

    count = send(texts)
    wait_until_encoded(client)
    before = state(client)["fused_requests"]
    assert send(texts[::-1]) == count
    found = state(client)
    assert found["fused_requests"] == before + 1, (found["not_fused"], found["quality"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_documents_in_a_field_that_no_route_reads_are_refused(client, path, stream) -> None:
    (model,) = json.loads(client.get("/v1/models"))["data"]
    said = {"model": model["id"], "stream": stream, "documents": FACTS[:2]}
    code, text = client.send(path, {**said, **OF_ROUTES[path][0]("What is it?")})
    assert (code, "text parts" in text) == (400, True)


def test_deleting_a_tenants_documents_reaches_the_tree_and_the_store(client) -> None:
    for tenant in ("a", "b"):
        learn(client, [(0, 1, 2, 3)], extra_key=tenant)
        assert report(ask(client, *prompt((2, 0, 3, 1), 1), extra_key=tenant))["fused"]
    deleted = client.send("/canopy/documents?extra_key=a", method="DELETE")
    assert (deleted[0], json.loads(deleted[1])) == (200, {"deleted": True})
    again = ask(client, *prompt((2, 0, 3, 1), 1), 1, extra_key="a")
    assert (report(again)["fused"], report(again)["missing_chunks"]) == (False, 4)
    assert again["meta_info"]["cached_tokens"] == 0
    assert report(ask(client, *prompt((3, 1, 2, 0), 1), 1, extra_key="b"))["fused"]


def test_a_chunk_longer_than_the_context_is_refused(client) -> None:
    said = {"max_new_tokens": 1, "custom_params": {"canopy_chunks": [0, 8999]}}
    body = {"input_ids": tokens(9000, 1), "sampling_params": said}
    code, text = client.send("/generate", body)
    assert code == 400
    assert "9000" in text
    assert client.generate(tokens(10, 2), 1)["output_ids"]


ORDERS = [(1, 0, 2, 3), (2, 1, 3, 0), (3, 2, 0, 1), (1, 3, 2, 0)]


@pytest.mark.long
def test_tensor_parallel_ranks_reuse_the_same_documents(server, tiny_model) -> None:
    cores = {
        "SGLANG_CPU_OMP_THREADS_BIND": "0|0"
    }  # SGLang needs this if a rank has no NUMA node of its own
    with server(tiny_model, *ON, "--tp", "2", kv_tokens=8192, environment=cores) as client:
        learn(client, [(0, 1, 2, 3)])  # in idle time; only the first rank detects its end
        prompts = [prompt(order, i) for i, order in enumerate(ORDERS)]
        with ThreadPoolExecutor(4) as pool:
            reused = list(pool.map(lambda p: ask(client, *p, 4), prompts))
        assert all(report(r)["reused"] > 2 * DOCUMENT for r in reused)
        for (ids, bounds), first in zip(prompts, reused):
            longer = ids + first["output_ids"] + tokens(QUESTION, 600)
            turn = ask(client, longer, bounds, 4)
            assert report(turn)["computed"] == QUESTION + 1  # both ranks go on from kept KV
        assert state(client)["fallbacks"] == 0
        for ids, bounds in prompts:
            whole = ask(client, ids, bounds, 8, canopy_recompute_ratio=1.0)
            assert report(whole)["fused"]
            assert whole["output_ids"] == ask(client, ids, "off", 8)["output_ids"]
        said = {"custom_params": {"canopy_chunks": bounds, "canopy_selector": "frequency"}}
        code, text = client.send("/generate", {"input_ids": ids, "sampling_params": said})
        assert code == 400
        assert "--tp-size 2" in text


def cached(answer) -> int:
    return answer["meta_info"]["cached_tokens"]


def conversation(client, order, said, **params) -> list[dict]:
    """Send three turns: two questions, then two documents as a tool's result and a third question.
    ``said`` maps the bounds of a turn's documents to the request's field."""
    ids, bounds = prompt(order[:2], order[0])
    answers = [ask(client, ids, said(bounds), ANSWER, **params)]
    ids = ids + answers[0]["output_ids"] + tokens(QUESTION, 600)
    answers.append(ask(client, ids, said(bounds), ANSWER, **params))
    ids = ids + answers[1]["output_ids"] + tokens(5, 601)
    for document in order[2:]:
        bounds = [*bounds, len(ids), len(ids) + DOCUMENT]
        ids = ids + tokens(DOCUMENT, document)
    ids = ids + tokens(QUESTION, 602)
    answers.append(ask(client, ids, said(bounds), ANSWER, **params))
    answers.append(ask(client, ids, said(bounds), ANSWER, **params))  # a retry
    return answers


def test_turns_retries_and_samples_continue_from_kept_kv(client) -> None:
    learn(client, [(0, 1, 2, 3), (3, 2, 1, 0)])
    client.flush()
    first, second, third, retry = conversation(client, (2, 0, 3, 1), lambda bounds: bounds)
    assert report(first)["fused"]
    assert (report(first)["kept"], report(first)["reused"] > 0) == (0, True)
    asked = SYSTEM + 2 * DOCUMENT + QUESTION
    assert cached(second) == asked + ANSWER - 1  # without the last token of the answer
    assert (report(second)["fused"], report(second)["reused"]) == (True, 0)
    assert report(second)["kept"] == cached(second) - SYSTEM
    assert report(second)["computed"] == QUESTION + 1
    told = report(third)  # only the new documents are fused
    assert told["kept"] == cached(third) - SYSTEM >= asked
    assert told["reused"] + told["recomputed"] == 2 * DOCUMENT
    assert report(retry)["computed"] == 1
    before = state(client)
    ids, bounds = prompt((1, 3, 0), 77)
    sampling = {"max_new_tokens": 3, "temperature": 1.0, "ignore_eos": True, "n": 4}
    sampling["custom_params"] = {"canopy_chunks": bounds}
    samples = client.post("/generate", {"input_ids": ids, "sampling_params": sampling})
    assert len(samples) == 4
    assert all(report(one)["computed"] == 1 for one in samples)
    after = state(client)
    assert after["fused_requests"] == before["fused_requests"] + 1
    assert after["kept_requests"] == before["kept_requests"] + 4


def test_exact_and_approximate_requests_never_match_each_others_kv(client) -> None:
    learn(client, [(0, 1, 2, 3), (3, 2, 1, 0)])
    order = (3, 1, 2, 0)
    client.flush()
    clean = conversation(client, order, lambda _: "off")
    client.flush()
    poisoned = conversation(client, order, lambda bounds: bounds, canopy_recompute_ratio=0.0)
    assert report(poisoned[1])["kept"] > DOCUMENT
    assert [one["output_ids"] for one in poisoned] != [one["output_ids"] for one in clean]
    exact = conversation(client, order, lambda _: "off")
    assert [cached(one) for one in exact] == [cached(one) for one in clean]
    assert [one["output_ids"] for one in exact] == [one["output_ids"] for one in clean]
    ids, bounds = prompt(order[:2], order[0])
    client.flush()
    others = [{}, {"canopy_recompute_ratio": 0.3}, {"canopy_selector": "frequency"}]
    for params in others:  # no KV of one setting is another's
        assert cached(ask(client, ids, bounds, 1, **params)) == 0
    assert all(cached(ask(client, ids, bounds, 1, **params)) for params in others)
    assert cached(ask(client, ids, bounds, 1, extra_key="another tenant")) == 0


def test_an_exact_prefix_that_saves_as_much_is_kept(client) -> None:
    learn(client, [(0, 1, 2, 3), (3, 2, 1, 0)])
    client.flush()
    ids, bounds = prompt((1, 3), 9)
    whole = ask(client, ids, "off", 4)
    again = ask(client, ids, bounds, 4)
    assert cached(again) == len(ids) - 1
    assert again["output_ids"] == whole["output_ids"]
    assert report(again)["why"] == "its cached prefix saves as much as its stored documents"


def test_at_ratio_1_every_turn_is_plain_serving_and_shares_its_kv(client) -> None:
    learn(client, [(0, 1, 2, 3), (3, 2, 1, 0)])
    for order in ((1, 3, 0, 2), (2, 3, 1, 0)):
        client.flush()
        whole = conversation(client, order, lambda bounds: bounds, canopy_recompute_ratio=1.0)
        plain = conversation(client, order, lambda _: "off")
        assert [one["output_ids"] for one in whole] == [one["output_ids"] for one in plain]
        assert report(whole[0])["fused"]
        assert report(whole[0])["reused"] == 0
        assert cached(plain[0]) == SYSTEM + 2 * DOCUMENT + QUESTION - 1
        client.flush()
        assert [one["output_ids"] for one in whole] == [
            one["output_ids"] for one in conversation(client, order, lambda _: "off")
        ]


def test_documents_in_any_order_match_the_prefix_that_is_cached(client) -> None:
    client.flush()
    exact = {"canopy_recompute_ratio": 1.0}
    first = ask(client, *prompt((2, 0, 3)), ANSWER, **exact, canopy_order="any")
    again = ask(client, *prompt((3, 2, 0)), ANSWER, **exact, canopy_order="any")
    assert cached(again) == SYSTEM + 3 * DOCUMENT + QUESTION - 1
    assert again["output_ids"] == first["output_ids"]
    assert cached(ask(client, *prompt((3, 2, 0)), 1, **exact)) == SYSTEM  # its own order
    client.flush()
    plain = ask(client, *prompt((2, 0, 3))[:1], "off", ANSWER)
    assert plain["output_ids"] == first["output_ids"]


def test_a_client_that_names_the_namespace_is_refused(client) -> None:
    ids, _ = prompt((0,))
    key = "\x00canopy-documents/" + "0" * 24
    body = {"input_ids": ids, "extra_key": key, "sampling_params": {"max_new_tokens": 1}}
    code, text = client.send("/generate", body)
    assert code == 400
    assert "reserves for the KV of reused documents" in text


def test_a_ratio_is_found_through_the_server(client, tmp_path) -> None:
    out = tmp_path / "calibration.json"
    small = ["--prompts", "2", "--repeats", "1", "--chunks", "4", "--chunk-tokens", "64"]
    assert main(["documents", "calibrate", "--url", client.url, "--out", str(out), *small]) == 0
    (entry,) = json.loads(out.read_text()).values()
    assert 0.15 <= entry["ratio"] <= 1.0
    known = (entry["tier"], entry["backend"], entry["dtype"])
    assert known == ("memory", "torch_native", "float32")


NAME_OF_A_TIME = re.compile(r"(^|_)(time|at|since|date|stamp|when|clock|ago)(_|$)")
WITHIN_S = 600.0
"""A test takes less."""


def numbers(answer: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield each number with the name of its nearest key."""
    if isinstance(answer, dict):
        for key, value in answer.items():
            yield from numbers(value, key)
    elif isinstance(answer, list):
        for value in answer:
            yield from numbers(value, name)
    elif isinstance(answer, (int, float)) and not isinstance(answer, bool):
        yield name, answer


def wrong_times(answer: Any) -> list[tuple[str, float]]:
    """Return the numbers that are times, and have no name that shows which."""
    epoch, monotonic, found = time.time(), time.monotonic(), []
    for name, value in numbers(answer):
        is_epoch = abs(value - epoch) < WITHIN_S
        if is_epoch or name.endswith("_unix_s"):
            right = is_epoch and name.endswith("_unix_s")
        elif name.endswith("_ago_s"):
            right = 0.0 <= value < WITHIN_S
        else:
            clock = isinstance(value, float) and not value.is_integer()  # as a bound may be
            clock = clock and abs(value - monotonic) < WITHIN_S / 10
            right = not clock and not (NAME_OF_A_TIME.search(name) and name.endswith("_s"))
            right = right and NAME_OF_A_TIME.fullmatch(name) is None
        if not right:
            found.append((name, value))
    return found


def test_each_route_names_its_times(client) -> None:
    """Every time in an answer of Canopy's routes is an epoch time or an age, and its name shows which."""
    now, clock = time.time(), time.monotonic()
    for answer in ({"time": 3.0}, {"a": [{"made_at_s": 1.0}]}, {"end": now},
                   {"last_use": clock - 5.5}, {"clock_unix_s": clock}, {"clock_ago_s": now}):  # fmt: skip
        assert wrong_times(answer), answer
    assert not wrong_times({"a_unix_s": now - 3, "b_ago_s": 0.5, "uptime_s": 3.0, "rows": [1, 2.5]})
    pages = ("/canopy/ui", "/canopy/page", "/canopy/uPlot")
    listed = set(re.findall(r"\| (\w+) \| `(\S+)` \|", routes()))
    for seed in range(6):
        params = {"canopy_conversation": f"c{seed % 2}", "canopy_turn": 1 + seed // 2}
        client.generate(tokens(700, seed), 4, params)
    hint = {"conversation": "c0", "over": True}
    asked = {
        ("POST", "/canopy/hint"): client.send("/canopy/hint", hint),
        ("DELETE", "/canopy/documents"): client.send("/canopy/documents", method="DELETE"),
        ("GET", "/canopy/explain"): until(
            lambda: (
                (got := client.send("/canopy/explain?conversation=c0"))
                and '"cached"' in got[1]
                and got
            )
        ),
        ("GET", "/canopy/status"): client.send("/canopy/status"),
    }
    assert asked.keys() == {one for one in listed if not one[1].startswith(pages)}
    for route, (status, text) in asked.items():
        assert (status, wrong_times(json.loads(text))) == (200, []), route
    named = {name for name, _ in numbers(client.status())}
    assert {"time_unix_s", "clock_ago_s"} <= named
