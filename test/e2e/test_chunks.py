"""Chunk reuse in real servers: exact at ratio 1, and separate from exact KV."""

import itertools
import json
import random
import shutil
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.chunk_client import (
    DOCUMENT,
    ON,
    QUESTION,
    ask,
    learn,
    prompt,
    refused,
    report,
    state,
    tokens,
    wait_until_encoded,
)
from support.small_models import change_config

pytestmark = pytest.mark.xdist_group("documents")
FACTS = [f"The {a} of the {b} is {c}." for a, b, c in zip(["colour", "name", "size"] * 3,
         ["river", "lamp", "king", "town", "fox", "ship", "wall", "coat", "star"], range(9))]  # fmt: skip


@pytest.fixture
def client(shared_server, small_model):
    return shared_server(small_model, *ON, kv_tokens=8192)


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


BAD = [
    [10, 50, 30, 80],
    [10, 10],
    [0, 10_000],
    "yes",
    [1, 2, 3],
    [-5, 7],
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("bounds", BAD, ids=["overlap", "empty", "past", "word", "odd", "negative"])
def test_bad_bounds_get_400_and_the_server_continues(client, bounds, stream) -> None:
    params = {"max_new_tokens": 1, "custom_params": {"canopy_chunks": bounds}}
    body = {"sampling_params": params, "stream": stream}
    code, text = refused(client, "/generate", {"input_ids": tokens(200, 1), **body})
    assert code == 400
    assert "canopy_chunks" in text
    code, text = refused(client, "/generate", {"text": "Bounds count tokens.", **body})
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
    code, text = refused(client, path, {**said, **OF_ROUTES[path][0]("What is it?")})
    assert (code, "text parts" in text) == (400, True)


def test_deleting_a_tenants_documents_reaches_the_tree_and_the_store(client) -> None:
    for tenant in ("a", "b"):
        learn(client, [(0, 1, 2, 3)], extra_key=tenant)
        assert report(ask(client, *prompt((2, 0, 3, 1), 1), extra_key=tenant))["fused"]
    url = f"{client.url}/canopy/documents?extra_key=a"
    with urllib.request.urlopen(urllib.request.Request(url, method="DELETE"), timeout=60) as answer:
        assert json.loads(answer.read()) == {"deleted": True}
    again = ask(client, *prompt((2, 0, 3, 1), 1), 1, extra_key="a")
    assert (report(again)["fused"], report(again)["missing_chunks"]) == (False, 4)
    assert again["meta_info"]["cached_tokens"] == 0
    assert report(ask(client, *prompt((3, 1, 2, 0), 1), 1, extra_key="b"))["fused"]


def test_a_chunk_longer_than_the_context_is_refused(client) -> None:
    said = {"max_new_tokens": 1, "custom_params": {"canopy_chunks": [0, 8999]}}
    code, text = refused(
        client, "/generate", {"input_ids": tokens(9000, 1), "sampling_params": said}
    )
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
        code, text = refused(client, "/generate", {"input_ids": ids, "sampling_params": said})
        assert code == 400
        assert "--tp-size 2" in text


@pytest.mark.long
def test_without_the_flag_nothing_changes(shared_server, small_model, client) -> None:
    plain = shared_server(small_model, kv_tokens=8192)
    for i in range(3):
        ids, bounds = prompt((i, 5, 6, 7), 80 + i)
        off = ask(client, ids, "off", 8)
        ignored = ask(plain, ids, bounds, 8)
        assert "canopy_chunks" not in ignored["meta_info"]
        assert off["output_ids"] == ignored["output_ids"]
