"""600 requests to plain SGLang and to ``auto`` give equal answers. So do chats with documents,
under templates of eight families, while nothing is reused.

``fixtures/requests.jsonl`` has the requests: every generating route, streamed and not, with most
fields and many mistakes; sessions, LoRA, weights, pauses, aborts and caches."""

import http.client
import json
import re
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.chat_templates import TEMPLATES
from support.document_client import REUSE_FLAG

REQUESTS_FILE = Path(__file__).parent.parent / "fixtures" / "requests.jsonl"
FLAGS = ("--served-model-name", "m", "--page-size", "16", "--chunked-prefill-size", "256")
FLAGS += ("--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3")
FLAGS += ("--trust-request-chat-template",)
AUTO_FLAGS = ("--radix-eviction", "auto")
VOLATILE_KEYS = re.compile(
    r"(^|_)(id|created|created_at|completed_at|ts|time|tstamp|timestamp|latency|duration|throughput"
    r"|uptime|moments|us|weight_gb|cached_tokens\w*|prompt_tokens_details|input_tokens_details|wait"
    r"|pid|sequence_number|queue_length|modified_at|input_tokens|cache_read_input_tokens)$"
)
"""Keys whose values depend on time, names or the cache."""
RANDOM_NAMES = re.compile(
    r"\b(resp|msg|chatcmpl|cmpl|call|rs|fc)_[0-9a-f]{8,}|\b[0-9a-f]{32}\b|127\.0\.0\.1:\d+|0x[0-9a-f]+|\[\d\d(:\d\d){2}\]"
)
JOINED_KEYS = {"content", "reasoning_content", "arguments", "text", "delta", "partial_json", "thinking"}  # fmt: skip
"""Keys whose pieces are joined: the number of a stream's pieces depends on time, their sum does not."""
PIECE_PATHS = (".choices", ".response", ".message", ".content")  # others repeat what was sent


class FoldedAnswer(NamedTuple):
    """An answer's status, and its values by path in the JSON; "broken" if the server broke its stream off."""

    status: int
    leaves: Any


def send(url: str, row: dict[str, Any], model: Path) -> FoldedAnswer:
    """Return the answer to a request of the file."""
    text = row.get("raw", json.dumps(row["body"]) if "body" in row else None)
    if text is not None:
        text = re.sub(r"WORDS:(\d+)", lambda match: "word " * int(match[1]), text)
        text = text.replace('"MODEL"', json.dumps(str(model)))
    request = urllib.request.Request(
        url + row["path"],
        None if text is None else text.encode(),
        {"Content-Type": "application/json", **row.get("headers", {})},
        method=row["method"],
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return FoldedAnswer(response.status, fold(response.read().decode()))
    except urllib.error.HTTPError as error:
        return FoldedAnswer(error.code, fold(error.read().decode()))
    except http.client.HTTPException:  # SGLang breaks some streams at a mistake
        return FoldedAnswer(200, "broken")


def fold(text: str) -> Any:
    """Return the values of an answer or of a whole stream, by path in the JSON."""
    lines = [line.removeprefix("data:").strip() for line in text.splitlines()]
    events = lines if text.startswith(("data:", "event:")) or text.count('"done"') > 1 else [text]
    leaves: dict[str, Any] = defaultdict(str)
    for event in events:
        try:
            _fold(json.loads(event), "", len(events) > 1, leaves)
        except ValueError:
            if event not in ("", "[DONE]") and not event.startswith("event:"):
                leaves["text"] += RANDOM_NAMES.sub("*", event)
    return dict(leaves)


def _fold(value: Any, path: str, is_streamed: bool, leaves: dict[str, Any]) -> None:
    key = path.rpartition(".")[2]
    if is_streamed and not path and "meta_info" in value:  # of one prompt or sample of several
        path = f"[{value.get('index', 0)}]"
    if VOLATILE_KEYS.search(key):
        leaves[path] = "*"
    elif isinstance(value, dict):
        if is_streamed and value.get("type"):
            path += f".{value['type']}"
        for name, child in value.items():
            _fold(child, f"{path}.{name}", is_streamed, leaves)
    elif isinstance(value, list) and not (is_streamed and "logprobs" in path):
        for number, child in enumerate(value):
            index = child.get("index", number) if isinstance(child, dict) else number
            _fold(child, f"{path}[{index}]", is_streamed, leaves)
    elif isinstance(value, str):
        is_piece = is_streamed and key in JOINED_KEYS and path.startswith(PIECE_PATHS)
        leaves[path] = (leaves[path] if is_piece else "") + RANDOM_NAMES.sub("*", value)
    elif not is_streamed or value is not None:
        is_piece = isinstance(value, list) and path.startswith(PIECE_PATHS)
        leaves[path] = [*leaves[path], *_round(value)] if is_piece else _round(value)


def _round(value: Any) -> Any:
    """Return a value rounded, since sums in another order have other errors."""
    if isinstance(value, list):
        return [_round(item) for item in value]
    return round(value, 3) + 0.0 if isinstance(value, float) else value


def types_of(answer: FoldedAnswer) -> FoldedAnswer:
    """Return the types of an answer's values, for requests whose text SGLang samples."""
    return FoldedAnswer(answer.status, {leaf: type(value) for leaf, value in answer.leaves.items()})


def differences(expected: FoldedAnswer, actual: FoldedAnswer) -> Iterator[str]:
    """Yield a line for each difference of two answers."""
    if expected.status != actual.status or "broken" in (expected.leaves, actual.leaves):
        yield f"{str(expected)[:600]}, {str(actual)[:600]}"
        return
    for leaf in sorted({*expected.leaves, *actual.leaves}):
        values = [str(answer.leaves.get(leaf, "missing"))[:200] for answer in (expected, actual)]
        if values[0] != values[1]:
            yield f"{leaf}: {', '.join(values)}"


REQUEST_COUNTS = {"chat": 174, "comp": 103, "gen": 122, "raw": 72, "others": 131}
"""Requests of the file by the first word of their names; the word of a streamed one ends in s."""


def kind_of(row: dict[str, Any]) -> str:
    word = re.split("[:/]", row["name"])[0].removesuffix("s")
    return word if word in REQUEST_COUNTS and "-" not in row["name"] else "others"


@pytest.mark.long
@pytest.mark.parametrize("kind", REQUEST_COUNTS)
def test_plain_sglang_and_auto_answer_alike(shared_server, plain_sglang, small_model, kind) -> None:
    rows = [json.loads(line) for line in REQUESTS_FILE.read_text(encoding="utf-8").splitlines()]
    selected = [row for row in rows if kind_of(row) == kind]
    assert (len(selected), len(rows)) == (REQUEST_COUNTS[kind], sum(REQUEST_COUNTS.values()))
    clients = plain_sglang(small_model, *FLAGS), shared_server(small_model, *FLAGS, *AUTO_FLAGS)
    differing_answers = {}
    for row in selected:
        expected, actual = (send(client.url, row, small_model) for client in clients)
        if row.get("random"):
            expected, actual = types_of(expected), types_of(actual)
        if actual != expected:
            differing_answers[row["name"]] = expected, actual
    for name, answers in differing_answers.items():
        print(name, *differences(*answers), sep="\n  ")
    assert differing_answers.keys() == set()


NOUNS = ("river", "lamp", "king", "town", "fox")


def text_parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def chat(client: Any, family: str, messages: list[Any], **params: str) -> tuple[str, int, Any]:
    """Return the answer, its count of prompt tokens, and the report of reuse."""
    template = {"chat_template": TEMPLATES[family]}
    body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 12}
    body |= {"chat_template_kwargs": template, "custom_params": params, "return_meta_info": True}
    answer = client.post("/v1/chat/completions", body)
    (choice,) = answer["choices"]
    report = (choice["meta_info"].get("canopy_documents") or [{}])[0]
    return choice["message"]["content"], answer["usage"]["prompt_tokens"], report


@pytest.mark.long
@pytest.mark.parametrize("family", TEMPLATES)
def test_text_is_sglangs_while_nothing_is_reused(shared_server, plain_sglang, small_model, family):
    plain_client = plain_sglang(small_model, *FLAGS)
    client = shared_server(small_model, *FLAGS, *REUSE_FLAG, *AUTO_FLAGS)
    sentences = [f"Under {family} the {noun} was seen at the old mill, by the sea, in May of that year, at dawn." for noun in NOUNS]  # fmt: skip
    messages: list[Any] = [{"role": "system", "content": "Read, and answer in a few words."}]
    new_messages = [
        {"role": "user", "content": text_parts(*sentences[:3], "What was seen?")},
        {"role": "user", "content": "And who saw it?"},
        {"role": "tool", "tool_call_id": "a", "content": text_parts(sentences[3])},
        {"role": "user", "content": text_parts(sentences[4], "Which was first?")},
    ]
    for message in new_messages:
        messages.append(message)
        text, prompt_tokens, _ = chat(plain_client, family, messages)
        *text_and_tokens, report = chat(client, family, messages, canopy_documents="parts")
        assert (text_and_tokens, report["fused"]) == ([text, prompt_tokens], False), report
        messages.append({"role": "assistant", "content": f"<think>Well.</think>{text}"})
