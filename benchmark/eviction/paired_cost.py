"""CPU time of an arrival, a victim, ``evict_many``, an insert and a match, paired with an earlier commit.

    git worktree add --detach OLD COMMIT
    PYTHONPATH=python:test python benchmark/eviction/paired_cost.py OLD --rounds 40

Two processes, one with the code of the folder OLD, take turns. A round runs each of them once for each
policy, in alternating order. The ratio new / old of a cost is the median of all rounds' ratios; its
interval has 95 % of 2,000 medians of rounds that were drawn with replacement.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "paired_cost.json"
POLICIES = ("wa", "canopy-lru", "canopy-tlru")
COSTS = ("arrival", "evict", "evict_many", "insert", "match")
LEAVES, SINGLES, ARRIVALS = 4_000, 60, 2_000


def arrival_us(policy: str) -> float:
    """Median of the reception, the admission and the insertion of a turn, for 200 conversations."""
    from support.live_tree import LiveTree

    tree, draw = LiveTree(60_000, policy), random.Random(1)
    talks: dict[int, list[int]] = {}
    took = []
    for number in range(ARRIVALS):
        who = draw.randrange(200)
        path = talks.setdefault(who, [who])
        path.append(1_000 * who + len(path))
        begin = time.thread_time()
        tree.request(
            number * 0.1,
            conversation=f"c{who}",
            category=f"k{who % 8}",
            prompt_tokens=16 * len(path),
            block_tokens=16,
            path=tuple(path),
        )
        took.append(time.thread_time() - begin)
    return 1e6 * statistics.median(took)


def work() -> None:
    """Measure each policy named on a line of the standard input."""
    from victim_cost import measure

    for line in sys.stdin:
        policy = line.strip()
        found = {"arrival": arrival_us(policy), **measure(policy, LEAVES, SINGLES)}
        print(json.dumps(found), flush=True)


def worker(root: Path) -> subprocess.Popen[str]:
    folders = [root / "python", root / "test", Path(__file__).parent]
    return subprocess.Popen(
        [sys.executable, __file__, "--work"],
        env={**os.environ, "PYTHONPATH": ":".join(map(str, folders))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask(process: subprocess.Popen[str], policy: str) -> dict[str, float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(policy + "\n")
    process.stdin.flush()
    while not (line := process.stdout.readline()).startswith("{"):
        assert line, "the worker has ended"
    return json.loads(line)


def ratio(old: list[float], new: list[float]) -> dict[str, Any]:
    ratios, draw = [b / a for a, b in zip(old, new, strict=True)], random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2_000))
    return {
        "ratio": round(statistics.median(ratios), 3),
        "low": round(medians[50], 3),
        "high": round(medians[-51], 3),
        "old_us": round(statistics.median(old), 2),
        "new_us": round(statistics.median(new), 2),
        "rounds": len(ratios),
    }


def measure_pairs(old: Path, rounds: int, seconds: float) -> list[dict[str, Any]]:
    sides = {"old": worker(old), "new": worker(Path(__file__).resolve().parents[2])}
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    ends = time.monotonic() + seconds
    for number in range(-1, rounds):  # the first round warms up
        for policy in POLICIES:
            for side in sorted(sides, reverse=number % 2 == 0):
                result = ask(sides[side], policy)
                if number >= 0:
                    found.setdefault((policy, side), []).append(result)
        if time.monotonic() > ends:
            break
    for process in sides.values():
        process.terminate()
    return [
        {"policy": policy, "cost": cost}
        | ratio(*([row[cost] for row in found[policy, side]] for side in ("old", "new")))
        for policy in POLICIES
        for cost in COSTS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=240.0, help="stop after this time")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="OUT")
    arguments = parser.parse_args()
    rows = measure_pairs(arguments.old.resolve(), arguments.rounds, arguments.seconds)
    for row in rows:
        print(row)
    arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    work() if sys.argv[1:] == ["--work"] else main()
