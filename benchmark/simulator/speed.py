"""Speed and memory of the simulator on one core."""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

import numpy as np

from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.driver import simulate
from canopy_lab.sim.stack import lru_curve, stack_distances
from canopy_lab.trace.open import open_trace
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.registry import make_policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds mooncake/")
    parser.add_argument("--repeat", type=int, default=3, help="best of so many")
    args = parser.parse_args()

    ids = np.random.default_rng(0).zipf(1.2, size=1_000_000) % 300_000
    seconds = best(args.repeat, lambda: stack_distances(ids))
    show("flat stack pass, ids in an array", len(ids), seconds)

    flat = [
        TraceRequest(float(t), 1, 1, (block,), 1) for t, block in enumerate(ids[:500_000].tolist())
    ]
    seconds = best(args.repeat, lambda: lru_curve(flat))
    show("flat stack pass, from trace records", len(flat), seconds)

    path = args.data / "mooncake" / "conversation_first60.jsonl"
    trace = CompactTrace(open_trace(path, "mooncake"))
    capacity = trace.distinct_blocks // 20
    seconds = best(args.repeat, lambda: lru_curve(trace))
    show("conversation, every LRU capacity at once", len(trace), seconds)
    for name in ("lru", "s3fifo", "gdfs", "wa"):
        seconds = best(args.repeat, lambda n=name: simulate(trace, make_policy(n), capacity))
        show(f"conversation at 5 %, {name}", len(trace), seconds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of all of this: {peak:.0f} MiB")


def best(repeat: int, work) -> float:
    """Least CPU seconds of ``repeat`` runs: other processes on the machine do not count."""
    seconds = []
    for _ in range(repeat):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def show(what: str, requests: int, seconds: float) -> None:
    print(f"{what:45} {requests / seconds:12,.0f} requests/s")


if __name__ == "__main__":
    main()
