"""Prompt tokens that miss a prefix cache if documents may be reordered.

    python benchmark/chunk/any_order.py --json benchmark/chunk/results/any_order.json

Prompts of a system text, documents by Zipf's law and a question, in the server's own simulated LRU
tree. ``given``: shuffled, as retrieval ranks them. ``sorted``: by name, what a client can do by
itself. ``any``: as ``canopy_order`` arranges them. ``placebo``: the same with another tenant's
orders, so that nothing is learnt.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from canopy_chunks.text.order import Orders
from canopy_lab.sim.driver import simulate
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.registry import make_policy

BLOCK, SYSTEM, DOCUMENT = 64, 1, 5
"""Tokens of a block; blocks of the system text and of a document."""
WAYS = ("given", "sorted", "any", "placebo")
DOCUMENTS, REQUESTS = 200, 1000


def prompts(way: str, chunks: int, zipf: float, seed: int) -> Iterator[TraceRequest]:
    draw, orders = random.Random(seed), Orders()
    weights = [(i + 1) ** -zipf for i in range(DOCUMENTS)]
    names = draw.sample(range(DOCUMENTS), DOCUMENTS)
    chained: dict[tuple[int, int], int] = {}
    for number in range(REQUESTS):
        picked: list[int] = []
        while len(picked) < chunks:
            picked += set(draw.choices(names, weights)).difference(picked)
        draw.shuffle(picked)
        if way == "sorted":
            picked.sort()
        blocks, bounds = list(range(SYSTEM)), []
        for one in picked:
            bounds.append((len(blocks), len(blocks) + DOCUMENT))
            blocks += range(SYSTEM + one * DOCUMENT, SYSTEM + (one + 1) * DOCUMENT)
        if way in ("any", "placebo"):
            tenant = None if way == "any" else str(number)
            blocks, _ = orders.arrange(blocks, tuple(bounds), tenant)
        blocks.append(SYSTEM + DOCUMENTS * DOCUMENT + number)  # the question
        path = [-1]
        for one in blocks:
            path.append(chained.setdefault((path[-1], one), len(chained)))
        yield TraceRequest(float(number), BLOCK * len(blocks), 0, tuple(path[1:]), BLOCK)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    rows = []
    for chunks in (6, 11):
        for zipf in (0.8, 1.2):
            for held in (20, 200):
                computed = dict.fromkeys(WAYS, 0)
                for seed in range(args.seeds):
                    for way in WAYS:
                        blocks = held * (SYSTEM + chunks * DOCUMENT + 1)
                        trace = prompts(way, chunks, zipf, seed)
                        found = simulate(trace, make_policy("lru"), blocks)
                        computed[way] += found.tokens - found.token_hits
                rows.append({"chunks": chunks, "zipf": zipf, "prompts_held": held, **computed})
                print(rows[-1], flush=True)
    args.json.write_text(json.dumps({"seeds": args.seeds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
