"""Microseconds of a match and an insert on the scheduler's thread, by length of the prompt.

    python benchmark/eviction/long_prompts.py --json out.json

Conversations grow by ``--turn`` tokens a turn up to ``--longest``; every turn is matched whole and
inserted whole, as the scheduler does. The arms take turns, conversation by conversation, in one
process: Canopy policies, and SGLang's LRU on its Python core and on its Rust core (the same with
``python-again``, a placebo that shows the noise). ``request`` is Canopy's own work for a request:
hashing its blocks and calling the policies at its arrival and end. Times are CPU time of the thread, so
other work on the machine affects only its caches.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import time
import warnings
from array import array
from pathlib import Path
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from tqdm import tqdm  # noqa: E402

from support.live_tree import LiveTree, fake_req  # noqa: E402

SGLANG = {"python": "python", "python-again": "python", "rust": "rust"}
STEPS = ("match", "insert", "request")


class Arm:
    """A tree and the times of its calls."""

    def __init__(self, name: str, tokens: int, page_size: int) -> None:
        core = SGLANG.get(name)
        self.name = name
        self.ours = core is None
        self.tree = LiveTree(tokens, name if self.ours else "lru", page_size=page_size, core=core)
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
            if self.ours:
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
            if self.ours:
                core.requests.ended(req)
            finished = time.thread_time()
            if self.ours:
                core.inserting = request
            cache.insert(params)
            inserted = time.thread_time()
            if self.ours:
                core.inserting = None
            seconds = (matched - arrived, inserted - finished)
            if self.ours:
                seconds += ((arrived - started) + (finished - finishing),)
            taken[length] = {step: 1e6 * each for step, each in zip(STEPS, seconds, strict=False)}
        gc.enable()
        self.tree.evict(len(tokens))
        return taken


def measure(names: list[str], page_size: int, arguments: Any) -> list[dict[str, Any]]:
    arms = [Arm(name, arguments.longest + 2 * arguments.turn, page_size) for name in names]
    draw = random.Random(1)
    runs: dict[str, list[dict[int, dict[str, float]]]] = {name: [] for name in names}
    for number in tqdm(range(arguments.rounds + 1), unit="round", desc=f"pages of {page_size}"):
        tokens = array("q", (draw.randrange(100_000) for _ in range(arguments.longest)))
        draw.shuffle(arms)
        for arm in arms:
            taken = arm.converse(tokens, arguments.turn)
            if number:  # the first round warms up
                runs[arm.name].append(taken)
    wanted = [length for length in runs[names[0]][0] if length in arguments.lengths]
    rows = []
    for length in wanted:
        for name in names:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="wa,canopy-lru", help="Canopy's arms")
    parser.add_argument("--pages", default="1,64")
    parser.add_argument("--turn", type=int, default=2048)
    parser.add_argument("--longest", type=int, default=102_400)
    parser.add_argument("--lengths", default="2048,16384,51200,102400")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    arguments.lengths = {int(n) for n in arguments.lengths.split(",")}
    names = [*arguments.policy.split(","), *SGLANG]
    rows = []
    for page_size in arguments.pages.split(","):
        rows += measure(names, int(page_size), arguments)
    columns = ("match", "match/rust", "insert", "insert/rust", "request")
    print(f"{'page':>4} {'tokens':>7} {'arm':12}" + "".join(f"{c:>12}" for c in columns))
    for row in rows:
        cells = "".join(f"{row.get(column, ''):>12}" for column in columns)
        print(f"{row['page']:>4} {row['tokens']:>7} {row['arm']:12}{cells}")
    print("microseconds, the least of all rounds; x/rust: times what the Rust core takes")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
