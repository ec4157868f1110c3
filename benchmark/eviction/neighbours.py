"""Algorithms of other caches against ours: ARC, LIRS, LHD, 3L-Cache, and SGLang's session-aware cache.

    python benchmark/eviction/neighbours.py --data DIR [--out FILE] [--arms lru,arc,lirs]

DIR holds `mooncake/`. The algorithms are libCacheSim's (`pip install libcachesim`) on flat blocks. A hit
is the leading run of a prompt's blocks, which are accessed from the last to the first, as in our tree:
so their LRU is ours, except for prompts that evict their own blocks. SGLang's session-aware
cache (`--enable-session-radix-cache`) is the system simulator's, with whole nodes and clients that close
each session at its last answer, as only the trace knows it; its engine is so fast that none waits. A
server caches answers too, so those arms (`served`) compare with each other only. Prints block hits in %,
of `served` token hits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from canopy_lab.sim.driver import distinct_blocks, simulate
from canopy_lab.sim.system import SystemConfig, Workload, load_profile, simulate_system
from canopy_lab.sim.system.engine_profile import EngineProfile
from canopy_lab.trace.open import open_trace
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.registry import make_policy

CAPACITIES = (0.02, 0.05, 0.1, 0.2)
TRACES = {"conversation": "conversation_first60.jsonl", "synthetic": "synthetic_trace.jsonl"}
FLAT = {
    "arc": "ARC",
    "lirs": "LIRS",
    "lhd": "LHD",
    "3l-cache": "ThreeLCache",
    "w-tinylfu": "WTinyLFU",
    "sieve": "Sieve",
}
"""Our name -> class of libCacheSim."""
SPEED = 1e-5


def flat(trace: Sequence[TraceRequest], blocks: int, name: str) -> float:
    """Block hits of one of libCacheSim's algorithms."""
    import libcachesim

    cache = getattr(libcachesim, name)(blocks)
    request = libcachesim.Request()
    request.obj_size = 1
    hits = asked = touched = 0
    for record in trace:
        found = []
        for block in reversed(record.blocks):
            touched += 1
            request.obj_id, request.clock_time = block + 1, touched
            # Not ``find``: 3L-Cache's also finds evicted blocks that it remembers.
            found.append(bool(cache.get(request)))
        found.reverse()
        hits += found.index(False) if False in found else len(found)
        asked += len(record.blocks)
    return hits / asked


def on_the_tree(trace: Sequence[TraceRequest], blocks: int, policy: str) -> float:
    """Block hits of a policy of ours."""
    return simulate(trace, make_policy(policy), blocks).block_hit_ratio


def served(trace: Sequence[TraceRequest], blocks: int, **settings: Any) -> float:
    """Token hits on a simulated server, which caches answers too."""
    workload = Workload(trace, keep_stamps=True)
    config = SystemConfig(
        device_tokens=blocks * trace[0].block_tokens + workload.longest_tokens,
        waiting_prefixes="ignored",
        **settings,
    )
    return simulate_system(workload, config, _fast()).token_hit_ratio


def _fast() -> EngineProfile:
    """An engine whose steps take next to no time, so that no request waits."""
    profile = load_profile("llama-3.1-8b-h100")
    rows = ("attention_s", "decode_step_s")
    made = {n: tuple(tuple(s * SPEED for s in row) for row in getattr(profile, n)) for n in rows}
    return replace(
        profile, prefill_linear_s=tuple(s * SPEED for s in profile.prefill_linear_s), **made
    )


ARMS: dict[str, Callable[[Sequence[TraceRequest], int], float]] = {
    "lru": lambda trace, blocks: on_the_tree(trace, blocks, "lru"),
    "lru-flat": lambda trace, blocks: flat(trace, blocks, "LRU"),
    **{
        name: (lambda trace, blocks, of=of: flat(trace, blocks, of))  # type: ignore[misc]
        for name, of in FLAT.items()
    },
    "wa": lambda trace, blocks: on_the_tree(trace, blocks, "wa"),
    "served lru": lambda trace, blocks: served(trace, blocks, whole_nodes=True),
    "served sessions": lambda trace, blocks: served(
        trace, blocks, whole_nodes=True, session_refs="closed"
    ),
    "served wa": lambda trace, blocks: served(trace, blocks, device_policy="wa"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--arms", type=lambda text: text.split(","), default=list(ARMS))
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.traces:
        trace = list(open_trace(options.data / "mooncake" / TRACES[name], "mooncake"))
        distinct = distinct_blocks(trace)
        print(f"| {name} | " + " | ".join(f"{c:.0%}" for c in CAPACITIES) + " |")
        print("|---|" + "---:|" * len(CAPACITIES))
        for arm in options.arms:
            found = [round(100 * ARMS[arm](trace, round(c * distinct)), 2) for c in CAPACITIES]
            rows.append({"trace": name, "arm": arm, "block_hits": dict(zip(CAPACITIES, found))})
            print(f"| {arm} | " + " | ".join(f"{hit:.2f}" for hit in found) + " |", flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
