"""CPU microseconds that an eviction, an insert and a match cost, by number of evictable leaves.

    python benchmark/eviction/victim_cost.py --json out.json

The same tree (one leaf of eight tokens a request) in one process: a Canopy policy, SGLang's LRU
on its Python core and on its Rust core, rounds interleaved; CPU time
of the thread. ``evict`` is one whole call of the cache that frees one leaf; ``evict_many`` is a call
that frees 500, a leaf.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import statistics
import sys
import time
import warnings
from array import array
from pathlib import Path

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from tqdm import tqdm  # noqa: E402

from support.live_tree import LiveTree  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[1]))
import result_file  # noqa: E402

LEAF = 8
SINGLE, MANY, CALLS, PROBES = 60, 500, 5, 300


def key(i: int) -> RadixKey:
    return RadixKey(array("q", [i, i + 1, i + 2, i + 3, 5, 6, 7, 8]), None)


def micros(call, times: int) -> float:
    taken = []
    for _ in range(times):
        start = time.thread_time()
        call()
        taken.append(time.thread_time() - start)
    return statistics.median(taken) * 1e6


def measure(name: str, leaves: int, singles: int) -> dict[str, float]:
    core = name if name in ("python", "rust") else None
    policy, config = ("lru", None) if core else (name, {"quantum_tokens": 1})
    tree = LiveTree(leaves * LEAF + 64, policy, config, core=core)
    gc.collect()
    gc.disable()
    numbers = iter(range(leaves))

    def insert() -> None:
        slots = tree.allocator.alloc(LEAF)
        tree.cache.insert(InsertParams(key=key(next(numbers)), value=slots))

    insert_us = micros(insert, leaves)
    tree.evict(LEAF)  # the first eviction takes in all that was inserted
    evict_us = micros(lambda: tree.evict(LEAF), singles)
    many_us = micros(lambda: tree.evict(LEAF * MANY), CALLS) / MANY
    last = iter(range(leaves - 1, 0, -7))
    match_us = micros(
        lambda: tree.cache.match_prefix(MatchPrefixParams(key=key(next(last)))), PROBES
    )
    gc.enable()
    return {"insert": insert_us, "evict": evict_us, "evict_many": many_us, "match": match_us}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="wa,canopy-lru")
    parser.add_argument("--leaves", default="5000,20000,50000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    names = [*arguments.policy.split(","), "python", "rust"]
    sizes = [int(n) for n in arguments.leaves.split(",")]
    rows: dict[tuple[str, int], list[dict[str, float]]] = {}
    with tqdm(total=len(names) * len(sizes) * arguments.rounds, unit="tree") as bar:
        for _ in range(arguments.rounds):
            for leaves in sizes:
                for name in names:
                    singles = 15 if name == "python" else SINGLE
                    rows.setdefault((name, leaves), []).append(measure(name, leaves, singles))
                    bar.update()
    table = [
        {"core": name, "leaves": leaves}
        | {k: round(statistics.median(r[k] for r in found), 1) for k in found[0]}
        for (name, leaves), found in sorted(rows.items(), key=lambda kv: (kv[0][1], kv[0][0]))
    ]
    print(
        f"{'':12} {'leaves':>7} {'evict':>9} {'evict_many':>11} {'insert':>8} {'match':>7}   (microseconds, medians)"
    )
    for row in table:
        print(
            f"{row['core']:12} {row['leaves']:7} {row['evict']:9} {row['evict_many']:11} "
            f"{row['insert']:8} {row['match']:7}"
        )
    if arguments.json:
        result_file.write(arguments.json, table)


if __name__ == "__main__":
    main()
