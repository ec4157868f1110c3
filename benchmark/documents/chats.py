"""Chats whose documents are text parts, beside the same chats without ``canopy_documents``: seconds to an answer of one token.

    python benchmark/documents/chats.py --model DIR --data FILE --json OUT --repeats 6

Each turn sends the whole chat, to one server; sides in turn. The texts of a chat are of this chat alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from comparators.questions import read_examples
from serve import DocumentClient, ResultRow, server_of

ENCODE_PAUSE_S = 1.0
"""Pause after an answer, in which the server encodes."""
REUSE_PARTS = {"canopy_documents": "parts"}
DOCUMENT_CHARACTERS = 600
"""Characters of a document: about 140 tokens."""
MAX_CHAT_TOKENS = 3584
"""More tokens than any of the chats has."""

Message = dict[str, Any]


def _user_message(*texts: str) -> Message:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def _follow_up_chat(texts: Iterator[str]) -> list[Message]:
    follow_ups = [_user_message(f"And what of number {n}?") for n in range(4)]
    return [_user_message(*itertools.islice(texts, 8), "What is it about?"), *follow_ups]


def _agent_chat(texts: Iterator[str]) -> list[Message]:
    results = [{"role": "tool", "content": text} for text in itertools.islice(texts, 6)]
    return [_user_message(f"{next(texts)}\nFind out more."), *results]


def _many_parts_chat(texts: Iterator[str]) -> list[Message]:
    facts = [f"Fact {n} is not known." for n in range(300)]
    return [
        _user_message(next(texts), *facts[1:], "Which is known?"),
        *(_user_message(f"And number {n}?") for n in range(2)),
    ]


CHATS_BY_KIND = {"follow-up": _follow_up_chat, "agent": _agent_chat, "300 parts": _many_parts_chat}
"""Kind of chat -> the messages that a client adds turn by turn. The documents of ``follow-up`` are
stored before; no others are."""


def measure_chats(args: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield the seconds of each turn of chats with documents as parts and without the field
    ``canopy_documents``; then a summary of each kind."""
    examples = read_examples(args.data)
    documents = dict.fromkeys(d[:DOCUMENT_CHARACTERS] for e in examples for d in e.documents)
    texts = itertools.cycle(text for text in documents if len(text) == DOCUMENT_CHARACTERS)
    with server_of(args, MAX_CHAT_TOKENS) as client:
        for kind in args.kinds:
            rows: dict[str, list[ResultRow]] = {"parts": [], "plain": []}
            for repeat in range(args.repeats):
                client_messages = CHATS_BY_KIND[kind](texts)
                if kind == "follow-up":
                    *stored, question = (part["text"] for part in client_messages[0]["content"])
                    send(client, [_user_message(*stored[::-1], question)], REUSE_PARTS)
                for side in ("parts", "plain") if repeat % 2 == 0 else ("plain", "parts"):
                    client.wait_until_encoded()
                    client.flush()
                    row = _run_chat(client, client_messages, REUSE_PARTS if side == "parts" else {})
                    rows[side].append(row)
                    yield {"kind": kind, "repeat": repeat, "side": side, **row}
            yield {"kind": kind, **_summary(list(zip(rows["parts"], rows["plain"])))}


def _summary(pairs: list[tuple[ResultRow, ResultRow]]) -> ResultRow:
    """Return the ratios of first and of later turns, and equal texts of turns that are not fused."""
    ratios = [
        [parts_s / plain_s for parts_s, plain_s in zip(parts["ttft_s"], plain["ttft_s"])]
        for parts, plain in pairs
    ]
    later = sorted(ratio for turns in ratios for ratio in turns[1:])
    is_same_text = [
        parts_text == plain_text
        for parts, plain in pairs
        for fused, parts_text, plain_text in zip(parts["fused"], parts["text"], plain["text"])
        if not fused
    ]
    return {
        "first_ratio": round(statistics.median(turns[0] for turns in ratios), 3),
        "later_ratio": round(statistics.median(later), 3),
        "later_quartiles": [round(ratio, 3) for ratio in statistics.quantiles(later)[::2]],
        "later_turns": len(later),
        "first_plain_s": round(statistics.median(plain["ttft_s"][0] for _, plain in pairs), 2),
        "later_plain_s": round(
            statistics.median(t for _, plain in pairs for t in plain["ttft_s"][1:]), 2
        ),
        "not_fused": len(is_same_text),
        "same_text": sum(is_same_text),
    }


def _run_chat(
    client: DocumentClient, client_messages: list[Message], custom_params: dict[str, str]
) -> ResultRow:
    row: ResultRow = {"ttft_s": [], "cached": [], "fused": [], "text": []}
    messages: list[Message] = []
    for message in client_messages:
        messages.append(message)
        start_s = time.perf_counter()
        answer = send(client, messages, custom_params)
        row["ttft_s"].append(time.perf_counter() - start_s)
        (choice,) = answer["choices"]
        meta = choice["meta_info"]
        row["cached"].append(meta["cached_tokens"])
        row["fused"].append((meta.get("canopy_documents") or [{}])[0].get("fused", False))
        row["text"].append(choice["message"]["content"])
        messages.append({"role": "assistant", "content": "I see."})
        time.sleep(ENCODE_PAUSE_S)
    return row


def send(client: DocumentClient, messages: list[Message], custom_params: dict[str, str]) -> Any:
    """Return the answer of one token; greedy."""
    body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 1}
    body |= {"custom_params": custom_params, "return_meta_info": True}
    with client.post("/v1/chat/completions", body) as answer:
        return json.loads(answer.read())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True)
    add("--data", type=Path, required=True, help="a file of questions")
    add("--json", type=Path, required=True, help="written anew after every row")
    add("--kinds", nargs="+", choices=tuple(CHATS_BY_KIND), default=tuple(CHATS_BY_KIND))
    add("--repeats", type=int, default=6)
    add("--document-options", default="memory_mb=4096", help="value of --canopy-documents")
    add("--threads", type=int, default=1)
    args = parser.parse_args()
    settings, rows = {k: str(v) for k, v in vars(args).items()}, []
    for row in measure_chats(args):
        rows.append(row)
        print(json.dumps(row), flush=True)
        result = {"settings": settings, "rows": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
