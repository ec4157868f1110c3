"""Conversations over documents: seconds to the first token of each turn, of a retry, and of n samples."""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rag_load import Library, Prompt, flush, learn, median, off
from rag_pairs import cpu_s, timed
from rag_server import Rows, a_library, started

TURNS = 5
MORE = 2
"""Documents that a tool returns before turns 2 and 4."""
ANSWER = 24
"""Tokens of each answer in the history: a fixed text, so both sides have equal prompts."""
RETRIES = 5
SAMPLES = (4, 8)
SAMPLE_TOKENS = 8


def turns(tokenizer: Any, args: argparse.Namespace) -> None:
    """Run conversations with documents and with "off", in turns, by length of the first prompt."""
    lengths, rows = [int(x) for x in args.lengths.split(",")], Rows(args)
    with started(args, 2 * max(lengths), crowd=3) as server:
        for tokens in lengths:
            lib, chunks = a_library(tokenizer, args, tokens)
            learn_all(server.url, lib)
            for repeat in range(args.repeats):
                for row in pair(server, lib, chunks, tokens, repeat):
                    rows.add(row)
                    print(_line(row), flush=True)


def learn_all(url: str, lib: Library) -> None:
    """Let the server encode every document, also behind the system text, which must recur."""
    for documents in (lib.documents, lib.documents[::-1]):
        flush(url)
        learn(url, replace(lib, documents=documents), 4)


def pair(
    server: Any, lib: Library, chunks: int, tokens: int, repeat: int
) -> Iterator[dict[str, Any]]:
    """Run both sides on the same prompts; each begins with an empty tree."""
    first = lib.prompt(chunks + 2 * MORE)
    again, sampled = lib.prompt(chunks), [lib.prompt(chunks) for _ in SAMPLES]
    for side in ("documents", "plain") if repeat % 2 == 0 else ("plain", "documents"):
        flush(server.url)
        row = {"tokens": tokens, "chunks": chunks, "repeat": repeat, "side": side}
        row |= _conversation(server, lib, first, chunks, side)
        row |= _retry(server, again, side)
        for n, prompt in zip(SAMPLES, sampled):
            before = cpu_s(server.process.pid)
            row[f"n{n}_s"] = _samples(server.url, _as(prompt, side), n)
            row[f"n{n}_cpu_s"] = cpu_s(server.process.pid) - before
        yield row


def _as(prompt: Prompt, side: str) -> Prompt:
    return prompt if side == "documents" else off(prompt)


def _conversation(
    server: Any, lib: Library, drawn: Prompt, chunks: int, side: str
) -> dict[str, Any]:
    """Five turns. ``drawn`` has the documents of all of them; the first prompt has ``chunks``."""
    documents = [lib.documents[i] for i in drawn.documents]
    ids, bounds = list(lib.system), []
    answers = []
    for turn in range(TURNS):
        new = documents[:chunks] if turn == 0 else documents[:MORE] if turn in (2, 4) else []
        documents = documents[len(new) :]
        for document in new:
            bounds += [len(ids), len(ids) + len(document)]
            ids += document
        ids += lib.questions[turn % len(lib.questions)]
        answers.append(timed(server, _as(Prompt(list(ids), list(bounds), ()), side), tops=0))
        ids += lib.questions[-1][:1] * ANSWER
    return {
        "ttft_s": [one.ttft_s for one in answers],
        "cpu_s": [one.cpu_s for one in answers],
        "cached": [one.cached for one in answers],
        "prompt_tokens": len(ids) - ANSWER,
        "computed": [one.report.get("computed") for one in answers],
        "kept": [one.report.get("kept") for one in answers],
    }


def _retry(server: Any, prompt: Prompt, side: str) -> dict[str, Any]:
    """Send a prompt several times; return the median seconds of all but the first."""
    timed(server, _as(prompt, side), tops=0)
    again = [timed(server, _as(prompt, side), tops=0) for _ in range(RETRIES)]
    each = [one.ttft_s for one in again]
    cpu_s = median([one.cpu_s for one in again])
    return {"retry_s": median(each), "retry_cpu_s": cpu_s, "retries_s": each}


def _samples(url: str, prompt: Prompt, n: int) -> float:
    """Return the seconds until all ``n`` answers of 8 tokens are complete."""
    sampling = {"temperature": 0.7, "max_new_tokens": SAMPLE_TOKENS, "ignore_eos": True, "n": n}
    sampling["custom_params"] = {"canopy_chunks": prompt.bounds}
    body = {"input_ids": prompt.ids, "sampling_params": sampling}
    request = urllib.request.Request(
        url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begun = time.perf_counter()
    with urllib.request.urlopen(request, timeout=3600) as answer:
        found = json.loads(answer.read())
    assert len(found) == n
    return time.perf_counter() - begun


def _line(row: dict[str, Any]) -> str:
    seconds = " / ".join(f"{x:.2f}" for x in row["ttft_s"])
    samples = ", ".join(f"n = {n}: {row[f'n{n}_s']:.1f}" for n in SAMPLES)
    return f"{row['tokens']:5} {row['side']:9}  {seconds}  retry {row['retry_s']:.2f}  {samples}"
