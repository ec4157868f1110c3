"""CPU milliseconds of an exchange of policies on the scheduler's thread, by number of leaves.

    PYTHONPATH=test python benchmark/eviction/exchange_cost.py --json out.json

A real tree on CPU tensors, one leaf of four tokens a request. ``apply`` is the exchange itself,
``slowest`` the slowest arrival after it, ``arrivals`` their number until the new policy ranks, ``all``
the exchange and these arrivals together, less as many ordinary arrivals.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import time
import warnings
from pathlib import Path

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

from sglang_canopy.config.policy_change import PolicyChange  # noqa: E402
from sglang_canopy.config.tiers import PolicyChoice  # noqa: E402
from support.live_tree import LiveTree  # noqa: E402

CHANGES = ("canopy-lru", "wa", "etlru", "canopy-tlru", "wa")
"""One after another, from ``wa`` on."""
ORDINARY = 200
"""Arrivals after an exchange that is over, for comparison."""


def filled(leaves: int) -> LiveTree:
    tree = LiveTree(leaves * 4 + 64, "wa")
    for number in range(leaves):
        request = tree.request(
            number * 0.01,
            conversation=f"c{number}",
            category=f"k{number % 8}",
            prompt_tokens=4,
            block_tokens=1,
            path=[number * 7 + at for at in range(4)],
        )
        tree.insert([number * 10 + at for at in range(4)], request)
    tree.core.evictable_device_leaves.admit_pending()
    return tree


def timed(call: object) -> float:
    began = time.thread_time()
    call()  # type: ignore[operator]
    return 1e3 * (time.thread_time() - began)


def arrival(tree: LiveTree) -> None:
    """A request and the choice of a victim for it."""
    tree.request(tree.core.clock.now + 0.01)
    tree.core.evictable_device_leaves.next_victim(tree.core.clock.now)


def measure(leaves: int) -> list[dict[str, object]]:
    tree, rows = filled(leaves), []
    gc.collect()
    gc.disable()
    before = "wa"
    for name in CHANGES:
        change = PolicyChange(PolicyChoice(name))
        applied = timed(lambda change=change: tree.core.exchange.apply(change, "benchmark"))
        arrivals = [timed(lambda: arrival(tree))]
        while tree.core.exchange.handing_over:
            arrivals.append(timed(lambda: arrival(tree)))
        usual = [timed(lambda: arrival(tree)) for _ in range(ORDINARY)]
        rows.append(
            {
                "leaves": leaves,
                "change": f"{before} to {name}",
                "apply_ms": round(applied, 2),
                "slowest_ms": round(max(arrivals), 2),
                "arrivals": len(arrivals),
                "all_ms": round(
                    applied + sum(arrivals) - len(arrivals) * statistics.median(usual), 1
                ),
            }
        )
        before = name
    gc.enable()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leaves", default="5000,20000,50000")
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    rows = [row for leaves in arguments.leaves.split(",") for row in measure(int(leaves))]
    print(
        f"{'leaves':>7}  {'change':24} {'apply':>8} {'slowest':>8} {'arrivals':>8} {'all':>8}   (CPU ms)"
    )
    for row in rows:
        print(
            f"{row['leaves']:7}  {row['change']:24} {row['apply_ms']:8} {row['slowest_ms']:8} "
            f"{row['arrivals']:8} {row['all_ms']:8}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
