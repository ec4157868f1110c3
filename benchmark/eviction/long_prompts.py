"""Microseconds of a match and an insert on the scheduler's thread, by length of the prompt.

Conversations grow by ``TURN`` tokens a turn up to ``LONGEST``; every turn is matched whole and
inserted whole, as the scheduler does. The arms take turns, conversation by conversation, in one
process: Canopy policies, and SGLang's LRU on its Python core and on its Rust core (the same with
``python-again``, a placebo that shows the noise). ``request`` is Canopy's own work for a request:
hashing its blocks and calling the policies at its arrival and end. Times are CPU time of the thread, so
other work on the machine affects only its caches.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import time
import warnings
from array import array
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402

from question import Question, RunContext  # noqa: E402
from support.live_tree import LiveTree, fake_req  # noqa: E402

SGLANG = {"python": "python", "python-again": "python", "rust": "rust"}
STEPS = ("match", "insert", "request")
NAMES = ["wa", "canopy-lru", *SGLANG]
PAGES, TURN, LONGEST, ROUNDS = (1, 64), 2048, 102_400, 15
LENGTHS = (2048, 16_384, 51_200, 102_400)


class TimedTree:
    """A tree and the times of its calls."""

    def __init__(self, name: str, tokens: int, page_size: int) -> None:
        core = SGLANG.get(name)
        self.name = name
        self.is_canopy = core is None
        self.tree = LiveTree(
            tokens, name if self.is_canopy else "lru", page_size=page_size, core=core
        )
        self.now = 0.0

    def converse(self, tokens: array, turn: int) -> dict[int, dict[str, float]]:
        """One conversation, then an empty tree. Microseconds of each step, by length."""
        cache, core = self.tree.cache, self.tree.core
        taken: dict[int, dict[str, float]] = {}
        slots = torch.empty(0, dtype=torch.int64)
        gc.collect()
        gc.disable()
        for length in range(turn, len(tokens) + 1, turn):
            prompt = tokens[:length]
            self.now += 10.0
            started = time.thread_time()
            req, request = None, None
            if self.is_canopy:
                req = fake_req(prompt, [], {"time": self.now})
                request = core.requests.of(req)
            arrived = time.thread_time()
            key = RadixKey(prompt, None, limit=length - 1)  # as the scheduler does
            hit = cache.match_prefix(MatchPrefixParams(key=key, req=req))
            matched = time.thread_time()
            assert hit.device_prefix_len == length - turn, (self.name, length, hit)
            slots = torch.cat([slots, self.tree.allocator.alloc(turn)])
            params = InsertParams(
                key=RadixKey(prompt, None), value=slots, prev_prefix_len=length - turn
            )
            finishing = time.thread_time()
            if self.is_canopy:
                core.requests.report_end(req)
            finished = time.thread_time()
            if self.is_canopy:
                core.inserting = request
            cache.insert(params)
            inserted = time.thread_time()
            if self.is_canopy:
                core.inserting = None
            seconds = (matched - arrived, inserted - finished)
            if self.is_canopy:
                seconds += ((arrived - started) + (finished - finishing),)
            taken[length] = {step: 1e6 * each for step, each in zip(STEPS, seconds, strict=False)}
        gc.enable()
        self.tree.evict(len(tokens))
        return taken


def measure(page_size: int) -> list[dict[str, Any]]:
    arms = [TimedTree(name, LONGEST + 2 * TURN, page_size) for name in NAMES]
    draw = random.Random(1)
    runs: dict[str, list[dict[int, dict[str, float]]]] = {name: [] for name in NAMES}
    for number in range(ROUNDS + 1):
        tokens = array("q", (draw.randrange(100_000) for _ in range(LONGEST)))
        draw.shuffle(arms)
        for arm in arms:
            taken = arm.converse(tokens, TURN)
            if number:  # the first round warms up
                runs[arm.name].append(taken)
    wanted = [length for length in runs[NAMES[0]][0] if length in LENGTHS]
    rows = []
    for length in wanted:
        for name in NAMES:
            row: dict[str, Any] = {"page": page_size, "tokens": length, "arm": name}
            for step in runs[name][0][length]:
                row[step] = round(least(runs[name], length, step), 1)
                if step != "request":
                    row[f"{step}/rust"] = round(row[step] / least(runs["rust"], length, step), 2)
            rows.append(row)
    return rows


def least(runs: list[dict[int, dict[str, float]]], length: int, step: str) -> float:
    """Return the undisturbed time: the least, since other work only adds to it."""
    return min(run[length][step] for run in runs)


def run(_: RunContext) -> list[dict[str, Any]]:
    return [row for page_size in PAGES for row in measure(page_size)]


QUESTIONS = (
    Question("long_prompts", "CPU time of match and insert by the prompt's length", run, 10),
)
