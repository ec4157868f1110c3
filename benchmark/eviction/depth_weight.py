"""Measure eviction by the cost of a miss: prefill seconds of ``wa`` with and without ``depth_weight``.

    python benchmark/eviction/depth_weight.py alone --data DIR --out results/depth_weight.json
    python benchmark/eviction/depth_weight.py queued --data DIR --out results/depth_weight_queued.json

Agents are overlays of sessions of agents_global.tar.xz, split by user: ``tune`` has users 2, 3 and 7,
``judge`` users 4 and 8; ``mixed`` are 150 of the 500 older sessions. ``alone`` serves an overlay of 60 sessions, blocks merged to 512 tokens, in a
cache that is a share of its distinct blocks; the seconds are those of each prompt's uncached tokens
alone under a profile. ``queued`` is a whole system: 50 agents in a closed loop, at shares of the
saturation of SGLang's defaults, every arm with the same sessions, starts and pauses. The placebo
weighs by the depth of another leaf, drawn once a leaf. A run that is in the result file already is
not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))
from by_user import write
from cost_hindsight import CostHindsight
from overlays import overlay

from canopy_lab.advise.sample import merged
from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.driver import distinct_blocks, simulate
from canopy_lab.sim.hindsight import make_hindsight
from canopy_lab.sim.hindsight.future import Future
from canopy_lab.sim.system import SystemConfig, Workload, load_profile
from canopy_lab.sim.system.loads import LoadedSystem
from canopy_lab.trace.open import open_trace
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy import registry, wa
from sglang_canopy.policy.base import Policy
from sglang_canopy.records import Leaf
from sglang_canopy.reuse.categories import Category
from sglang_canopy.reuse.depth_price import depth_bucket

USERS = {"tune": ("user2", "user3", "user7"), "judge": ("user4", "user8")}
PROFILE, DEVICE_TOKENS, STEP_TOKENS = "llama-3.1-8b-h100", 400_000, 8192
LONGEST = 131_072
"""Tokens of the longest request, which is the model's context; a session ends before a longer one."""
SHARES = (0.02, 0.05, 0.1)
LOADS = (0.8, 0.95, 1.2)
MERGED, POOL = 8, 5000


class Placebo(wa.WorkloadAware):
    """Weighs a leaf by another leaf's depth, drawn once."""

    name = "wa-placebo"

    def __init__(self, config: Any, *model: Any) -> None:
        super().__init__(config, *model)
        self._draw, self._pool = random.Random(1), list[int]()
        self._given: dict[Any, int] = {}

    def _bucket(self, leaf: Leaf, category: Category) -> int:
        pool, depth = self._pool, leaf.offset + leaf.length
        if len(pool) < POOL:
            pool.append(depth)
        else:
            pool[self._draw.randrange(POOL)] = depth
        key = id(leaf) if leaf.conversation is None else leaf.conversation
        return depth_bucket(self._given.setdefault(key, self._draw.choice(pool)))


POLICY = Placebo
registry._MODULES["wa-placebo"] = __name__ if __name__ != "__main__" else "depth_weight"

ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "lru": ("lru", {}),
    "wa": ("wa", {}),
    "auto": ("wa", {"depth_weight": "auto"}),
    "soft": ("wa", {"depth_weight": "soft"}),
    "auto, placebo": ("wa-placebo", {"depth_weight": "auto"}),
    "soft, placebo": ("wa-placebo", {"depth_weight": "soft"}),
    "gdfs": ("gdfs", {}),
    "s3fifo": ("s3fifo", {}),
}
ORDER = {"schedule_policy": "bounded-shortest", "session_gate": "footprint"}
QUEUED = {
    "sglang": {"whole_nodes": True, "waiting_prefixes": "touched"},
    **{
        name: {"device_policy": policy, "device_policy_config": config, **ORDER}
        for name, (policy, config) in ARMS.items()
        if policy.startswith("wa")
    },
}


def sessions(data: Path, split: str, count: int, seed: int) -> Iterator[TraceRequest]:
    """An overlay of the split's sessions, started within two hours."""
    with tempfile.TemporaryDirectory() as folder:
        write(data / "agents_global.tar.xz", USERS[split], Path(folder))
        yield from overlay(Path(folder), count, 7200.0, seed)


def mixed(data: Path, seed: int) -> Iterator[TraceRequest]:
    """An overlay of 150 of the 500 sessions of unknown users. The buckets and the factor of ``soft``
    were chosen on such overlays."""
    return overlay(data / "agentic_coding" / "traces_500.tar.xz", 150, 7200.0, seed)


def conversation(data: Path, seed: int) -> Iterator[TraceRequest]:
    """Half of the Mooncake trace: the first for seed 0, else the second."""
    rows = list(open_trace(data / "mooncake" / "conversation_first60.jsonl", "mooncake"))
    half = len(rows) // 2
    yield from rows[half:] if seed else rows[:half]


def within(requests: Iterator[TraceRequest], longest: int) -> list[TraceRequest]:
    over: set[str | None] = set()
    kept = []
    for request in requests:
        if request.input_tokens + request.output_tokens > longest:
            over.add(request.user)
        if request.user not in over:
            kept.append(request)
    return kept


def alone(data: Path, split: str, seed: int, share: float, arm: str) -> dict[str, Any]:
    """Seconds and hits of one policy, every request priced alone."""
    trace = _alone_trace(data, split, seed)
    profile = load_profile(PROFILE)
    policy: Policy
    if arm == "hindsight":
        policy = make_hindsight("belady", Future(trace))
    elif arm == "hindsight by cost":
        policy = CostHindsight(Future(trace), profile.depth_scale(STEP_TOKENS))
    else:
        name, config = ARMS[arm]
        if name == "gdfs":
            config = {"attention_tokens": profile.depth_scale(STEP_TOKENS)}
        policy = registry.make_policy(name, config)
    policy.set_depth_scale(profile.depth_scale(STEP_TOKENS))
    blocks = round(share * distinct_blocks(trace))
    result = simulate(trace, policy, blocks)
    pairs = profile.pair_s()
    seconds = np.array(
        [
            profile.prefill_batch_s([(max(left, 1), max(r.input_tokens - left, 0))], pairs)
            for left, r in zip(result.uncached_tokens, trace, strict=True)
        ]
    )
    return {
        "requests": len(trace),
        "hits": 100 * result.token_hit_ratio,
        "seconds": float(seconds.sum()),
        **{f"p{q}": float(np.percentile(seconds, q)) for q in (50, 90, 99)},
    }


_traces: dict[tuple[str, int], list[TraceRequest]] = {}


def _alone_trace(data: Path, split: str, seed: int) -> list[TraceRequest]:
    if (split, seed) not in _traces:
        _traces.clear()
        if split == "conversation":
            made = list(conversation(data, seed))
        else:
            found = mixed(data, seed) if split == "mixed" else sessions(data, split, 60, seed)
            made = [merged(r, MERGED) for r in found]
        _traces[split, seed] = made
    return _traces[split, seed]


class Queued:
    """Runs of one overlay."""

    def __init__(self, data: Path, split: str, seed: int) -> None:
        rows = within(sessions(data, split, 50, seed), LONGEST)[:2000]
        self.seed, self.profile = seed, load_profile(PROFILE)
        self.workload = Workload(CompactTrace(rows), seed=seed)
        self._saturation: float | None = None

    def _system(self, arm: str) -> LoadedSystem:
        config = SystemConfig(device_tokens=DEVICE_TOKENS, fixed_outputs=True, **QUEUED[arm])
        return LoadedSystem(self.workload, config, self.profile, loop="closed", keep_stamps=True)

    def run(self, load: float, arm: str) -> dict[str, Any]:
        if self._saturation is None:
            self._saturation = self._system("sglang").saturation(self.seed)
        made = self._system(arm).at(load * self._saturation, self.seed)
        latency, system = made.latency, made.system
        return {
            "saturation": self._saturation,
            "sessions_per_hour": latency.sessions_per_hour,
            "busy_s": system.busy_share * system.makespan_s,
            "mean": latency.ttft_s.mean,
            "p50": latency.ttft_s.p50,
            "p99": latency.ttft_s.p99,
            "hits": 100 * system.token_hit_ratio,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("part", choices=("alone", "queued"))
    add("--data", type=Path, required=True, help="folder with agents_global.tar.xz and mooncake/")
    add("--out", type=Path, required=True, help="result, JSON lines are merged into it")
    add("--splits", default="tune,judge", help="tune, judge; alone also conversation and mixed")
    add("--seeds", type=int, default=20, help="overlays of a split")
    add("--first-seed", type=int, default=0)
    add("--minutes", type=float, default=math.inf, help="stop after so long")
    args = parser.parse_args()
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    done = {(r["split"], r["seed"], r["at"], r["arm"]) for r in rows}
    until = time.monotonic() + 60 * args.minutes
    axis = SHARES if args.part == "alone" else LOADS
    arms = [*ARMS, "hindsight", "hindsight by cost"] if args.part == "alone" else list(QUEUED)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    for seed, split in itertools.product(seeds, args.splits.split(",")):
        if split == "conversation" and seed > 1:
            continue
        queued = None
        for at, arm in itertools.product(axis, arms):
            if (split, seed, at, arm) in done or time.monotonic() > until:
                continue
            if args.part == "alone":
                found = alone(args.data, split, seed, at, arm)
            else:
                queued = queued or Queued(args.data, split, seed)
                found = queued.run(at, arm)
            kept = {k: v if isinstance(v, int) else float(f"{v:.6g}") for k, v in found.items()}
            rows.append({"split": split, "seed": seed, "at": at, "arm": arm, **kept})
            print(rows[-1], flush=True)
        lines = ",\n".join(json.dumps(row) for row in rows)
        args.out.write_text(f"[\n{lines}\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
