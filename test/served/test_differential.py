"""600 kinds of requests to plain SGLang and to ``auto`` give equal answers; chats with documents under templates
of eight families too, while nothing is reused.

``fixtures/requests.jsonl`` has the requests: every generating route, streamed and not, with most
fields and many mistakes; sessions, LoRA, weights, pauses, aborts and caches.
"""

import http.client
import json
import re
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.chat_templates import TEMPLATES
from support.document_client import REUSE_FLAG

REQUESTS = Path(__file__).parent.parent / "fixtures" / "requests.jsonl"
FLAGS = ("--served-model-name", "m", "--page-size", "16", "--chunked-prefill-size", "256")
FLAGS += ("--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3")
FLAGS += ("--trust-request-chat-template",)
AUTO = ("--radix-eviction", "auto")
VOLATILE = re.compile(
    r"(^|_)(id|created|created_at|completed_at|ts|time|tstamp|timestamp|latency|duration|throughput"
    r"|uptime|moments|us|weight_gb|cached_tokens\w*|prompt_tokens_details|input_tokens_details|wait"
    r"|pid|sequence_number|queue_length|modified_at|input_tokens|cache_read_input_tokens)$"
)
"""Keys whose values depend on time, names or the cache."""
NAMES = re.compile(
    r"\b(resp|msg|chatcmpl|cmpl|call|rs|fc)_[0-9a-f]{8,}|\b[0-9a-f]{32}\b|127\.0\.0\.1:\d+|0x[0-9a-f]+"
)
JOINED = {"content", "reasoning_content", "arguments", "text", "delta", "partial_json", "thinking"}
"""Keys of streams' pieces: a stream's pieces depend on time, and their sum does not."""


def answer(url: str, row: dict[str, Any], model: Path) -> tuple[int, Any]:
    """Return the status and the folded answer of a request."""
    raw = row.get("raw", json.dumps(row["body"]) if "body" in row else None)
    if raw is not None:
        raw = re.sub(r"WORDS:(\d+)", lambda match: "word " * int(match[1]), raw)
        raw = raw.replace('"MODEL"', json.dumps(str(model)))
    request = urllib.request.Request(
        url + row["path"],
        None if raw is None else raw.encode(),
        {"Content-Type": "application/json", **row.get("headers", {})},
        method=row["method"],
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, fold(response.read().decode())
    except urllib.error.HTTPError as error:
        return error.code, fold(error.read().decode())
    except http.client.HTTPException:  # SGLang breaks some streams at a mistake
        return 200, "broken"


def fold(text: str) -> Any:
    """Return an answer's or a whole stream's values by leaf."""
    lines = [line.removeprefix("data:").strip() for line in text.splitlines()]
    events = lines if text.startswith(("data:", "event:")) or text.count('"done"') > 1 else [text]
    leaves: dict[str, Any] = defaultdict(str)
    for event in events:
        try:
            _fold(json.loads(event), "", len(events) > 1, leaves)
        except ValueError:
            if event not in ("", "[DONE]") and not event.startswith("event:"):
                leaves["text"] += NAMES.sub("*", event)
    return dict(leaves)


def _fold(value: Any, path: str, streamed: bool, leaves: dict[str, Any]) -> None:
    key = path.rpartition(".")[2]
    if streamed and not path and "meta_info" in value:  # of one prompt or sample of several
        path = f"[{value.get('index', 0)}]"
    if VOLATILE.search(key):
        leaves[path] = "*"
    elif isinstance(value, dict):
        if streamed and value.get("type"):
            path += f".{value['type']}"
        for name, child in value.items():
            _fold(child, f"{path}.{name}", streamed, leaves)
    elif isinstance(value, list) and not (streamed and "logprobs" in path):
        for number, child in enumerate(value):
            index = child.get("index", number) if isinstance(child, dict) else number
            _fold(child, f"{path}[{index}]", streamed, leaves)
    elif isinstance(value, str):
        cumulative = not path.startswith((".choices", ".response", ".message", ".content"))
        is_piece = streamed and key in JOINED and not cumulative
        leaves[path] = (leaves[path] if is_piece else "") + NAMES.sub("*", value)
    elif not streamed or value is not None:
        leaves[path] = _round(value)


def _round(value: Any) -> Any:
    """Return a value without the errors of sums in another order."""
    if isinstance(value, list):
        return [_round(item) for item in value]
    return round(value, 3) + 0.0 if isinstance(value, float) else value


def shape(answer: tuple[int, Any]) -> tuple[int, Any]:
    """Return the types of an answer's leaves: SGLang's defaults draw its text."""
    status, leaves = answer
    return status, {leaf: type(value) for leaf, value in leaves.items()}


def differences(expected: tuple[int, Any], actual: tuple[int, Any]) -> Iterator[str]:
    """Yield a line for each difference of two answers."""
    if expected[0] != actual[0] or "broken" in (expected[1], actual[1]):
        yield f"{str(expected)[:600]}, {str(actual)[:600]}"
        return
    for leaf in sorted({*expected[1], *actual[1]}):
        pair = [str(answer[1].get(leaf, "missing"))[:200] for answer in (expected, actual)]
        if pair[0] != pair[1]:
            yield f"{leaf}: {', '.join(pair)}"


KINDS = {"chat": 174, "comp": 103, "gen": 122, "raw": 72, "others": 131}
"""Number of requests by the first word of their names; a stream's word ends in s."""


def kind(row: dict[str, Any]) -> str:
    word = re.split("[:/]", row["name"])[0].removesuffix("s")
    return word if word in KINDS and "-" not in row["name"] else "others"


@pytest.mark.long
@pytest.mark.parametrize("kind_name", KINDS)
def test_plain_sglang_and_auto_answer_alike(shared_server, stock, small_model, kind_name) -> None:
    rows = [json.loads(line) for line in REQUESTS.read_text(encoding="utf-8").splitlines()]
    selected = [row for row in rows if kind(row) == kind_name]
    assert (len(selected), len(rows)) == (KINDS[kind_name], sum(KINDS.values()))
    clients = stock(small_model, *FLAGS), shared_server(small_model, *FLAGS, *AUTO)
    differing = {}
    for row in selected:
        expected, actual = (answer(client.url, row, small_model) for client in clients)
        if row.get("random"):
            expected, actual = shape(expected), shape(actual)
        if actual != expected:
            differing[row["name"]] = expected, actual
    for name, pair in differing.items():
        print(name, *differences(*pair), sep="\n  ")
    assert differing.keys() == set()


NOUNS = ("river", "lamp", "king", "town", "fox")


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def chat(client: Any, family: str, messages: list[Any], **custom: str) -> tuple[str, int, Any]:
    """Return the answer, the prompt's tokens, and the report of reuse."""
    template = {"chat_template": TEMPLATES[family]}
    body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 12}
    body |= {"chat_template_kwargs": template, "custom_params": custom, "return_meta_info": True}
    answer = client.post("/v1/chat/completions", body)
    (choice,) = answer["choices"]
    report = (choice["meta_info"].get("canopy_documents") or [{}])[0]
    return choice["message"]["content"], answer["usage"]["prompt_tokens"], report


@pytest.mark.long
@pytest.mark.parametrize("family", TEMPLATES)
def test_text_is_sglangs_while_nothing_is_reused(shared_server, stock, small_model, family) -> None:
    baseline = stock(small_model, *FLAGS)
    client = shared_server(small_model, *FLAGS, *REUSE_FLAG, *AUTO)
    sights = [f"Under {family} the {noun} was seen at the old mill, by the sea, in May of that year, at dawn." for noun in NOUNS]  # fmt: skip
    system = {"role": "system", "content": "Read, and answer in a few words."}
    messages: list[Any] = [system]
    new_messages = [
        {"role": "user", "content": parts(*sights[:3], "What was seen?")},
        {"role": "user", "content": "And who saw it?"},
        {"role": "tool", "tool_call_id": "a", "content": parts(sights[3])},
        {"role": "user", "content": parts(sights[4], "Which was first?")},
    ]
    for message in new_messages:
        messages.append(message)
        text, tokens, _ = chat(baseline, family, messages)
        *text_and_tokens, report = chat(client, family, messages, canopy_documents="parts")
        assert (text_and_tokens, report["fused"]) == ([text, tokens], False), report
        messages.append({"role": "assistant", "content": f"<think>Well.</think>{text}"})
