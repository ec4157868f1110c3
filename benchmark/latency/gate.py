"""Simulated agents at the cliff: sessions an hour with and without a session gate.

    python benchmark/latency/gate.py --data DIR --out FILE.json [--rates 30,40,60] [--seeds 1,2]

DIR holds ``agentic_coding/traces_500.tar.xz``. The sessions are an overlay of 100 conversations, each up
to the first request beyond a context of 128 ki tokens. They run in a closed loop: a turn is sent after
the previous answer and a think time of at most 120 s; sessions begin at random at the offered rate. One instance, profile qwen2.5-7b-h100, 1 M tokens of device memory, LRU.

``Together`` is our server with its default protection of waiting requests; the others protect only the
head of the queue (``--canopy-protect-waiting off``).

``sessions_per_hour``: between the 20th and the 80th of 100 sessions that ended. ``p99_session_s``:
from the due time of a session's first turn to its last answer. ``new_p99_ttft_s`` is of first turns,
``later_mean_ttft_s`` of all others; waits at the gate count in both.

Runs are added to FILE.json, each once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from canopy_lab.sim.system import SystemConfig, TierSpec, Workload, load_profile, simulate_system
from canopy_lab.sim.system.arrivals import ClosedLoop
from canopy_lab.trace.record import TraceRequest
from canopy_lab.trace.sessions import session_links

sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))
from overlays import overlay

CONVERSATIONS = 100
CONTEXT_TOKENS = 131_072
DEVICE_TOKENS = 1_000_000
HOST = "host"
ARMS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "footprint": {"session_gate": "footprint"},
    "Together": {
        "waiting_prefixes": "by-place",
        "device_policy": "wa",
        "schedule_policy": "bounded-shortest",
        "session_gate": "footprint",
    },
    "host 2x, write_back": {HOST: 2.0, "write_policy": "write_back"},
}
"""Name -> arguments of ``SystemConfig``; ``host`` in multiples of the device's memory."""


class Timed:
    """Arrivals that remember when each session began and was last answered."""

    def __init__(self, inner: ClosedLoop, first: Sequence[int]) -> None:
        self.inner = inner
        self.first = first
        self.begun = {request: due for due, request in inner.begin()}
        self.ended: dict[int, float] = {}

    def begin(self) -> Any:
        return self.inner.begin()

    def answered(self, request: int, end_s: float) -> Any:
        self.ended[self.first[request]] = end_s
        return self.inner.answered(request, end_s)


def sessions(archive: Path, seed: int) -> Iterator[TraceRequest]:
    """Yield the overlay's requests, each session up to the first that exceeds the context."""
    over: set[str | None] = set()
    for request in overlay(archive, CONVERSATIONS, 7200.0, seed):
        if request.input_tokens + request.output_tokens > CONTEXT_TOKENS:
            over.add(request.user)
        if request.user not in over:
            yield request


def run(workload: Workload, arm: str, rate: float, seed: int) -> dict[str, Any]:
    """One simulation."""
    profile = load_profile("qwen2.5-7b-h100", None)
    settings = {"device_tokens": DEVICE_TOKENS, "waiting_prefixes": "awaited", **ARMS[arm]}
    size, speed = settings.pop(HOST, 0.0), profile.host
    if size:
        assert speed is not None
        settings["host"] = TierSpec(
            size * DEVICE_TOKENS * profile.kv_bytes_per_token,
            speed.read_bytes_per_s,
            speed.write_bytes_per_s,
            policy=settings.get("device_policy", "lru"),
        )
    first_turn = session_links(workload.trace).first
    timed = Timed(ClosedLoop(workload, sessions_per_hour=rate, seed=seed), first_turn)
    began = time.perf_counter()
    result = simulate_system(workload, SystemConfig(**settings), profile, arrivals=timed, seed=seed)
    first = sorted(timed.ended)
    ends = sorted(timed.ended.values())
    low, high = int(0.2 * len(ends)), int(0.8 * len(ends))
    lasted = [timed.ended[session] - timed.begun[session] for session in first]
    new, later = result.ttft_s[first], np.delete(result.ttft_s, first)
    return {
        "arm": arm,
        "offered_per_hour": rate,
        "seed": seed,
        "sessions_per_hour": round((high - low) / (ends[high] - ends[low]) * 3600, 2),
        "p99_session_s": round(float(np.percentile(lasted, 99)), 1),
        "mean_session_s": round(statistics.fmean(lasted), 1),
        "new_p99_ttft_s": round(float(np.percentile(new, 99)), 2),
        "new_mean_ttft_s": round(float(new.mean()), 2),
        "later_mean_ttft_s": round(float(later.mean()), 3),
        "later_p99_ttft_s": round(float(np.percentile(later, 99)), 2),
        "token_hit_ratio": round(result.token_hit_ratio, 4),
        "sessions": len(ends),
        "cpu_s": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", default="40")
    parser.add_argument("--seeds", default="1,2,3,4")
    args = parser.parse_args()
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    done = {(row["arm"], row["offered_per_hour"], row["seed"]) for row in rows}
    for seed in map(int, args.seeds.split(",")):
        archive = args.data / "agentic_coding" / "traces_500.tar.xz"
        workload = Workload(sessions(archive, seed))
        for rate in map(float, args.rates.split(",")):
            for arm in ARMS:
                if (arm, rate, seed) in done:
                    continue
                rows.append(run(workload, arm, rate, seed))
                args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
