"""600 kinds of requests to plain SGLang and to ``auto`` give equal answers.

``fixtures/requests.jsonl`` has the requests: every generating route, streamed and not, with most
fields and many mistakes; sessions, LoRA, weights, pauses, aborts and caches.
"""

import http.client
import json
import re
import urllib.error
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

REQUESTS = Path(__file__).parent.parent / "fixtures" / "requests.jsonl"
FLAGS = ("--served-model-name", "m", "--page-size", "16", "--chunked-prefill-size", "256")
FLAGS += ("--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3")
VOLATILE = re.compile(
    r"(^|_)(id|created|created_at|completed_at|ts|time|tstamp|timestamp|latency|duration|throughput"
    r"|uptime|cached_tokens\w*|prompt_tokens_details|input_tokens_details|wait|pid|sequence_number"
    r"|queue_length|input_tokens|cache_read_input_tokens)$"
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
        raw = re.sub(r"WORDS:(\d+)", lambda found: "word " * int(found[1]), raw)
        raw = raw.replace('"MODEL"', json.dumps(str(model)))
    request = urllib.request.Request(
        url + row["path"],
        None if raw is None else raw.encode(),
        {"Content-Type": "application/json", **row.get("headers", {})},
        method=row["method"],
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, folded(response.read().decode())
    except urllib.error.HTTPError as error:
        return error.code, folded(error.read().decode())
    except http.client.HTTPException:  # SGLang breaks some streams at a mistake
        return 200, "broken"


def folded(text: str) -> Any:
    """Return what a client has at an answer's or stream's end: leaf -> value."""
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
    if VOLATILE.search(key):
        leaves[path] = "*"
    elif isinstance(value, dict):
        if streamed and value.get("type"):
            path += f".{value['type']}"
        for name, one in value.items():
            _fold(one, f"{path}.{name}", streamed, leaves)
    elif isinstance(value, list) and not (streamed and "logprobs" in path):
        for number, one in enumerate(value):
            place = one.get("index", number) if isinstance(one, dict) else number
            _fold(one, f"{path}[{place}]", streamed, leaves)
    elif isinstance(value, str):
        cumulative = not path.startswith((".choices", ".response", ".message", ".content"))
        joins = streamed and key in JOINED and not cumulative
        leaves[path] = (leaves[path] if joins else "") + NAMES.sub("*", value)
    elif not streamed or value is not None:
        leaves[path] = round(value, 3) + 0.0 if isinstance(value, float) else value


@pytest.mark.long
def test_plain_sglang_and_auto_answer_alike(server, small_model) -> None:
    rows = [json.loads(line) for line in REQUESTS.read_text(encoding="utf-8").splitlines()]
    plain = server(small_model, *FLAGS, kv_tokens=4096, environment={"SGLANG_PLUGINS": "none"})
    ours = server(small_model, *FLAGS, "--radix-eviction", "auto", kv_tokens=4096)
    differences = {}
    with plain as one, ours as other:
        for row in rows:
            expected, found = (answer(client.url, row, small_model) for client in (one, other))
            if found != expected:
                differences[row["name"]] = expected, found
    assert len(rows) == 602
    for name, (expected, found) in differences.items():
        print(name, str(expected)[:600], str(found)[:600], sep="\n  ")
    assert differences.keys() == set()
