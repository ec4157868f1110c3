"""Hits of ``{"model": "duel"}`` beside those of what it chooses from, and of LRU.

    python benchmark/eviction/duel.py --data DIR [--out FILE]

DIR holds `mooncake/` and `agentic_coding/`. Every trace and capacity, two processes; about five
minutes. Prints a table: prompt tokens that hit, in %, and the duel's distance from LRU and from the
best. ``--one-in N`` starts with one block of N in the sample.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from canopy_lab.sim.driver import distinct_blocks, simulate
from canopy_lab.trace.open import open_trace
from canopy_lab.trace.overlay import overlay
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.policy.sampled_caches import SampledCaches

TRACES = ("conversation", "synthetic", "agentic-1", "agentic-2", "agentic-3")
CAPACITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
"""Shares of the trace's distinct blocks."""

ARMS = ("survival", "exponential", "recency")


@lru_cache(1)
def trace(data: Path, name: str) -> tuple[list[TraceRequest], int]:
    """A trace's requests and its distinct blocks; the agentic ones are overlays by seed."""
    kind, _, seed = name.partition("-")
    if kind == "agentic":
        archive = data / "agentic_coding" / "traces_500.tar.xz"
        requests = list(overlay(archive, 60, 7200.0, int(seed), own_prefixes=True))
    else:
        files = {"conversation": "conversation_first60.jsonl", "synthetic": "synthetic_trace.jsonl"}
        requests = list(open_trace(data / "mooncake" / files[kind], "mooncake"))
    return requests, distinct_blocks(requests)


def row(data: Path, name: str, share: float, one_in: int) -> dict[str, Any]:
    """One trace at one capacity under LRU, each arm and the duel; hits in % of prompt tokens."""
    requests, blocks = trace(data, name)
    hits = {}
    policies = {"lru": make_policy("lru")}
    policies |= {arm: make_policy("wa", {"model": arm}) for arm in (*ARMS, "duel")}
    duel: Any = policies["duel"]
    duel.duel.caches = SampledCaches(None if one_in == 1 else one_in)
    for arm, policy in policies.items():
        hits[arm] = 100 * simulate(requests, policy, max(1, int(blocks * share))).token_hit_ratio
    stats = duel.stats()["duel"]
    return {
        "trace": name,
        "capacity": share,
        **{arm: round(value, 3) for arm, value in hits.items()},
        "against_lru": round(hits["duel"] - hits["lru"], 3),
        "against_best": round(hits["duel"] - max(hits[arm] for arm in ARMS), 3),
        "switches": stats["switches"],
        "one_block_in": stats["one_block_in"],
    }


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The rows as Markdown."""
    columns = ("lru", *ARMS, "duel", "against_lru", "against_best")
    yield "| trace | capacity | " + " | ".join(columns).replace("_", " ") + " | switches |"
    yield "|---|---:|" + "---:|" * (len(columns) + 1)
    for one in rows:
        values = [f"{one[c]:+.2f}" if c.startswith("against") else f"{one[c]:.2f}" for c in columns]
        yield (
            f"| {one['trace']} | {one['capacity']:.0%} | "
            + " | ".join(values)
            + f" | {one['switches']} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=TRACES)
    parser.add_argument("--one-in", type=int, default=1)
    options = parser.parse_args()
    with ProcessPoolExecutor(2) as pool:
        running = [
            pool.submit(row, options.data, name, share, options.one_in)
            for name in options.traces
            for share in CAPACITIES
        ]
        rows = [one.result() for one in running]
    print("\n".join(table(rows)))
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
