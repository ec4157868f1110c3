"""CPU time that causes of missed tokens take on the scheduler's thread.

    PYTHONPATH=test python benchmark/latency/missed_time.py

Conversations over SGLang's tree with Canopy on it, in CPU memory. ``Departures`` is all that finds,
records and sums causes; the thread clock is read around each of its calls, and its own time subtracted.
A load's share is its CPU seconds per second of traffic. Writes results/missed_time.json.
"""

from __future__ import annotations

import functools
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "missed_time.json"
BLOCK = 64
LOADS = {
    "conversations of 500 to 1,000 blocks, 5 a second": (5, 500, 1000),
    "conversations of 64 to 128 blocks, 50 a second": (50, 64, 128),
    "new prompts of 1,000 blocks, 5 a second": (5, 1000, 0),
}
"""Requests per second, blocks of a first prompt, and blocks beyond which a conversation ends: about
300,000 prompt tokens per second, nearly all missed."""
SECONDS, WARM_S = 60, 30
DEVICE_TOKENS = 1_000_000
CALLS = ("classify_misses", "count_misses", "written", "left")


class Clock:
    """CPU seconds of the calls of one object's methods."""

    def __init__(self, owner: Any) -> None:
        self.seconds, self.calls = 0.0, 0
        empty = self._timed(lambda: None)
        for _ in range(20_000):
            empty()
        self.read_s, self.seconds, self.calls = self.seconds / self.calls, 0.0, 0
        for name in CALLS:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, call: Any) -> Any:
        @functools.wraps(call)
        def timed(*args: Any, **named: Any) -> Any:
            begin = time.thread_time()
            try:
                return call(*args, **named)
            finally:
                self.seconds += time.thread_time() - begin
                self.calls += 1

        return timed

    def read(self) -> float:
        """Return the seconds so far, without those of the clock."""
        return self.seconds - self.calls * self.read_s


def measure(rate: int, first: int, longest: int) -> dict[str, float]:
    """Serve ``SECONDS`` of a load; return the share after ``WARM_S``, in percent, and what it is of."""
    from support.live_tree import LiveTree
    from support.missed_runs import Run

    tree, draw = LiveTree(DEVICE_TOKENS, "wa", page_size=BLOCK), random.Random(1)
    departures = tree.core.departures
    clock, talks, took = Clock(departures), dict[int, list[int]](), []

    def fresh(blocks: int) -> list[int]:
        return [draw.randrange(1 << 30) for _ in range(blocks * BLOCK)]

    for number in range(rate * SECONDS):
        who, begin = draw.randrange(rate * 20), clock.read()
        tokens = talks.get(who, [])
        tokens = tokens + fresh(4) if 0 < len(tokens) <= longest * BLOCK else fresh(first)
        talks[who] = tokens
        Run(tree, tokens, time=number / rate).admit().end(output=8)
        took.append(clock.read() - begin)
    took = took[rate * WARM_S :]
    sums = departures.missed.sums
    return {
        "share": 100 * rate * statistics.fmean(took),
        "longest_ms": 1e3 * max(took),
        "missed_tokens": sum(sums.values()),
        "evicted_tokens": sum(n for (cause, _), n in sums.items() if cause == "evicted"),
        "one_block_in": departures.one_in,
    }


def table() -> str:
    """The share of each load."""
    lines = ["| load, blocks of 64 tokens | % of the scheduler's thread | longest request, ms | known blocks |", "|---|---:|---:|---:|"]  # fmt: skip
    for name, row in json.loads(RESULTS.read_text(encoding="utf-8")).items():
        known = f"1 in {row['one_block_in']}" if row["one_block_in"] > 1 else "all"
        lines.append(f"| {name} | {row['share']:.2f} | {row['longest_ms']:.1f} | {known} |")
    return "\n".join(lines)


PARTS = {"table": table}

if __name__ == "__main__":
    found = {name: measure(*load) for name, load in LOADS.items()}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table())
