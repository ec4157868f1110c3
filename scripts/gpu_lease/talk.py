"""HTTP client of the lease, with the standard library only."""

from __future__ import annotations

import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

URL = f"http://127.0.0.1:{os.environ.get('PORT', '30000')}"
TOKENS = range(100, 40000)
"""Ids that prompts are drawn from: no special ones."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer. seconds: duration; cached: prompt tokens in the exact cache; documents:
    ``meta_info.canopy_chunks``; top: log-probabilities of the first token by id."""

    seconds: float
    ids: list[int]
    cached: int
    documents: dict[str, Any] = field(default_factory=dict)
    top: dict[int, float] = field(default_factory=dict)


def draw(source: random.Random, count: int) -> list[int]:
    """``count`` random tokens."""
    return source.choices(TOKENS, k=count)


def post(path: str, body: dict[str, Any], timeout_s: float = 120) -> bytes:
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return answer.read()


def read(path: str) -> Any:
    with urllib.request.urlopen(URL + path, timeout=20) as answer:
        return json.loads(answer.read())


def generate(
    ids: Sequence[int], count: int, fields: dict[str, Any] | None = None, top: int = 0
) -> Answer:
    """``count`` greedy tokens after ``ids``; fields: of ``custom_params``."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    if fields:
        sampling["custom_params"] = fields
    body: dict[str, Any] = {"input_ids": list(ids), "sampling_params": sampling}
    if top:
        body |= {"return_logprob": True, "top_logprobs_num": top, "logprob_start_len": -1}
    begin = time.perf_counter()
    answer = json.loads(post("/generate", body))
    seconds = time.perf_counter() - begin
    about = answer["meta_info"]
    report = about.get("canopy_chunks") or {}
    first = about["output_top_logprobs"][0] if top else []
    return Answer(
        seconds,
        answer["output_ids"],
        about.get("cached_tokens", 0),
        report[0] if isinstance(report, list) else report,
        {token: value for value, token, *_ in first},
    )


def flush(tries: int = 20) -> None:
    """Empty the prefix cache once no request runs. Raises OSError after ``tries``."""
    for left in reversed(range(tries)):
        try:
            post("/flush_cache", {})
            return
        except urllib.error.URLError:
            if not left:
                raise
            time.sleep(0.5)


def documents_state() -> dict[str, Any]:
    """The counters of ``--canopy-chunks``."""
    return read("/server_info")["internal_states"][0].get("canopy_chunks", {})
