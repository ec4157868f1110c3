"""A RAG workload: real documents, a few of them popular, drawn into prompts in any order."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comparators.questions import read

from sglang_canopy.errors import CanopyError

SYSTEM = "You answer questions from the documents that follow. Answer in a few words.\n\n"


@dataclass(slots=True)
class Prompt:
    """Token ids, the flat bounds of the documents in it (or ``"off"``), and which they are."""

    ids: list[int]
    bounds: list[int] | str
    documents: tuple[int, ...]


def off(prompt: Prompt) -> Prompt:
    """Return the same prompt without chunk reuse."""
    return Prompt(prompt.ids, "off", prompt.documents)


@dataclass(slots=True)
class Library:
    """Documents as ids, popular ones first; prompts are drawn by Zipf's law without repetition."""

    system: list[int]
    documents: list[list[int]]
    questions: list[list[int]]
    zipf: float
    draw: random.Random
    _weights: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._weights = [(i + 1) ** -self.zipf for i in range(len(self.documents))]

    def prompt(self, chunks: int) -> Prompt:
        """Return a prompt of ``chunks`` different documents, shuffled, and a question."""
        picked: list[int] = []
        while len(picked) < chunks:
            one = self.draw.choices(range(len(self.documents)), self._weights)[0]
            if one not in picked:
                picked.append(one)
        self.draw.shuffle(picked)
        ids, bounds = list(self.system), []
        for i in picked:
            bounds += [len(ids), len(ids) + len(self.documents[i])]
            ids += self.documents[i]
        return Prompt(ids + self.draw.choice(self.questions), bounds, tuple(picked))


def library(
    tokenizer: Any, source: Path, count: int, tokens: int, zipf: float, seed: int
) -> Library:
    """``count`` documents of ``tokens`` tokens each from a question file or a folder of text files.

    Raises CanopyError if there is not enough text.
    """
    texts, questions = _texts(source)
    encode = tokenizer.encode
    stream = itertools.chain.from_iterable(
        encode(t.strip() + "\n\n", add_special_tokens=False) for t in texts
    )
    documents = [list(itertools.islice(stream, tokens)) for _ in range(count)]
    if len(documents[-1]) < tokens:
        raise CanopyError(f"{source} has too little text for {count} documents of {tokens} tokens")
    asked = [encode(f"Question: {q}\nAnswer:", add_special_tokens=False) for q in questions]
    system = encode(SYSTEM, add_special_tokens=False)
    return Library(system, documents, asked, zipf, random.Random(seed))


def _texts(source: Path) -> tuple[list[str], list[str]]:
    if source.is_dir() and (files := sorted(source.rglob("*.txt")) + sorted(source.rglob("*.md"))):
        return [f.read_text(errors="replace") for f in files], ["What is this about?"]
    files = [source] if source.is_file() else sorted(source.glob("*.json"))
    if not files:
        raise CanopyError(f"{source} holds neither text files nor question files")
    examples = [e for f in files for e in read(f)]
    texts = list(dict.fromkeys(d for e in examples for d in e.documents if len(d) > 40))
    return texts, [e.question for e in examples]


@dataclass(slots=True)
class Answer:
    """Result of a request: TTFT, the report of reuse, token ids and top log-probabilities, and the
    server's processor seconds if requested."""

    ttft_s: float
    cached: int
    report: dict[str, Any]
    ids: list[int]
    top: dict[int, float]
    cpu_s: float = 0.0


def ask(
    url: str,
    prompt: Prompt,
    tokens: int = 1,
    tops: int = 0,
    stream: bool | None = None,
    **params: Any,
) -> Answer:
    """Send a prompt; greedy. With one token the time of the request is its TTFT.

    stream: by default for several tokens; the answer then has its time only.
    """
    stream = tokens > 1 if stream is None else stream
    said = {"canopy_chunks": prompt.bounds, **params}
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": prompt.ids, "stream": stream}
    body["sampling_params"] = {**sampling, "custom_params": said}
    if tops:
        body |= {"return_logprob": True, "top_logprobs_num": tops, "logprob_start_len": -1}
    request = urllib.request.Request(
        url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started = time.perf_counter()
    with urllib.request.urlopen(request, timeout=3600) as answer:
        if stream:
            first = None
            for line in answer:
                if first is None and line.startswith(b"data:"):
                    first = time.perf_counter() - started
            return Answer(first or 0.0, 0, {}, [], {})
        found = json.loads(answer.read())
    took = time.perf_counter() - started
    meta = found["meta_info"]
    top = {t[1]: t[0] for t in meta["output_top_logprobs"][0]} if tops else {}
    report = (meta.get("canopy_chunks") or [{}])[0]
    return Answer(took, meta["cached_tokens"], report, found["output_ids"], top)


def state(url: str) -> dict[str, Any]:
    """The server's counters of chunk reuse."""
    with urllib.request.urlopen(url + "/server_info", timeout=600) as answer:
        return json.loads(answer.read())["internal_states"][0]["canopy_chunks"]


def flush(url: str) -> None:
    """Empty the exact cache; SGLang waits until the last answer has gone out."""
    request = urllib.request.Request(url + "/flush_cache?timeout=20", method="POST")
    urllib.request.urlopen(request, timeout=600).close()


def learn(url: str, lib: Library, chunks: int) -> None:
    """Send every document once and wait until all are encoded."""
    for at in range(0, len(lib.documents), chunks):
        ids, bounds = list(lib.system), []
        for document in lib.documents[at : at + chunks]:
            bounds += [len(ids), len(ids) + len(document)]
            ids += document
        ask(url, Prompt([*ids, *lib.questions[0]], bounds, ()))
    settle(url)


def settle(url: str) -> None:
    """Wait until all documents sent so far are encoded."""
    while (now := state(url))["waiting_chunks"] or now["waiting_tokens"]:
        time.sleep(0.5)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the quantile ``share`` of the values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
