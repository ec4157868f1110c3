"""Microseconds of a match and an insert on the scheduler's thread, by length of the prompt.

Conversations grow by ``TURN_TOKENS`` tokens a turn up to ``MAX_TOKENS``; every turn is matched whole and
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

from question import Question, QuestionRun  # noqa: E402
from support.live_tree import LiveTree, fake_req  # noqa: E402

SGLANG_CORES = {"python": "python", "python-again": "python", "rust": "rust"}
TIMED_STEPS = ("match", "insert", "request")
ARM_NAMES = ["wa", "canopy-lru", *SGLANG_CORES]
PAGE_SIZES, TURN_TOKENS, MAX_TOKENS, ROUND_COUNT = (1, 64), 2048, 102_400, 15
REPORTED_LENGTHS = (2048, 16_384, 51_200, 102_400)


class TimedTree:
    """A tree of one arm, whose calls are timed."""

    def __init__(self, name: str, tokens: int, page_size: int) -> None:
        sglang_core = SGLANG_CORES.get(name)
        self.name = name
        self.is_canopy = sglang_core is None
        policy = name if self.is_canopy else "lru"
        self.tree = LiveTree(tokens, policy, page_size=page_size, sglang_core=sglang_core)
        self.now_s = 0.0

    def time_conversation(self, tokens: array, turn_tokens: int) -> dict[int, dict[str, float]]:
        """Run one conversation, then empty the tree. Return each step's microseconds by prompt tokens."""
        cache, core = self.tree.cache, self.tree.core
        step_us: dict[int, dict[str, float]] = {}
        slots = torch.empty(0, dtype=torch.int64)
        gc.collect()
        gc.disable()
        for length in range(turn_tokens, len(tokens) + 1, turn_tokens):
            prompt = tokens[:length]
            self.now_s += 10.0
            start_s = time.thread_time()
            req, request = None, None
            if self.is_canopy:
                req = fake_req(prompt, [], {"time": self.now_s})
                request = core.requests.register(req)
            arrived_s = time.thread_time()
            key = RadixKey(prompt, None, limit=length - 1)  # as the scheduler does
            hit = cache.match_prefix(MatchPrefixParams(key=key, req=req))
            matched_s = time.thread_time()
            assert hit.device_prefix_len == length - turn_tokens, (self.name, length, hit)
            slots = torch.cat([slots, self.tree.allocator.alloc(turn_tokens)])
            params = InsertParams(
                key=RadixKey(prompt, None), value=slots, prev_prefix_len=length - turn_tokens
            )
            finishing_s = time.thread_time()
            if self.is_canopy:
                core.requests.report_end(req)
            finished_s = time.thread_time()
            if self.is_canopy:
                core.inserting_request = request
            cache.insert(params)
            inserted_s = time.thread_time()
            if self.is_canopy:
                core.inserting_request = None
            step_s = (matched_s - arrived_s, inserted_s - finished_s)
            if self.is_canopy:
                step_s += ((arrived_s - start_s) + (finished_s - finishing_s),)
            step_us[length] = {step: 1e6 * s for step, s in zip(TIMED_STEPS, step_s, strict=False)}
        gc.enable()
        self.tree.evict(len(tokens))
        return step_us


def measure_page_size(page_size: int) -> list[dict[str, Any]]:
    arms = [TimedTree(name, MAX_TOKENS + 2 * TURN_TOKENS, page_size) for name in ARM_NAMES]
    rng = random.Random(1)
    runs: dict[str, list[dict[int, dict[str, float]]]] = {name: [] for name in ARM_NAMES}
    for round_number in range(ROUND_COUNT + 1):
        tokens = array("q", (rng.randrange(100_000) for _ in range(MAX_TOKENS)))
        rng.shuffle(arms)
        for arm in arms:
            step_us = arm.time_conversation(tokens, TURN_TOKENS)
            if round_number:  # the first round warms up
                runs[arm.name].append(step_us)
    lengths = [length for length in runs[ARM_NAMES[0]][0] if length in REPORTED_LENGTHS]
    rows = []
    for length in lengths:
        for name in ARM_NAMES:
            row: dict[str, Any] = {"page": page_size, "tokens": length, "arm": name}
            for step in runs[name][0][length]:
                row[step] = round(least_us(runs[name], length, step), 1)
                if step != "request":
                    row[f"{step}/rust"] = round(row[step] / least_us(runs["rust"], length, step), 2)
            rows.append(row)
    return rows


def least_us(runs: list[dict[int, dict[str, float]]], length: int, step: str) -> float:
    """Return the least microseconds of a step over all rounds, since other work only adds to them."""
    return min(run[length][step] for run in runs)


def run_arms(_: QuestionRun) -> list[dict[str, Any]]:
    return [row for page_size in PAGE_SIZES for row in measure_page_size(page_size)]


QUESTIONS = (
    Question("long_prompts", "CPU time of match and insert by the prompt's length", run_arms, 10),
)
