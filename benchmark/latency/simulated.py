"""TTFT under load, simulated: the gains of eviction, order, gate and copies.

    python benchmark/latency/simulated.py --data DATA            # all parts, two at a time
    python benchmark/latency/simulated.py --data DATA --seeds 0,1 --only conversation

A part is a workload, a profile, a seed and a size of the host tier. Its loads are shares of the
saturation of SGLang's defaults, which it measures first. Every run is written when it ends, and a
finished run of the same settings is not repeated. Arms are in arms.py.

Workloads, 2,000 requests or fewer each: `conversation` and `synthetic` are Mooncake's traces,
stretched to the load, a turn no earlier than the previous answer; a seed is another window of
the first, and other starts of the conversations of the second. `agentic` is 50 conversations of
the agentic archive in a closed loop, chosen by the seed; sub-agents included. Its load is the rate of
new sessions. `pauses` is the conversation trace with pauses ten times as long, `mix` half of its
requests together with agents that begin in the same time (mixed.py). `unseen-conversation` and
`unseen-synthetic` are windows of the first two that no constant was chosen on.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arms import ARMS, UNSEEN, Arm
from mixed import merged, with_pauses

from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.system import SystemConfig, TierSpec, Workload, load_profile
from canopy_lab.sim.system.loads import LoadedSystem, LoadRun
from canopy_lab.trace.open import open_trace
from canopy_lab.trace.record import TraceRequest

sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in ("", "traces")]
from overlays import overlay

import result_file

RESULTS = Path(__file__).parent / "results" / "simulated"
REQUESTS = 2000
SESSIONS = 50
SESSIONS_OF_MIX = 20
PAUSES = 10.0
"""Factor of the gaps between turns in `pauses`."""
LOADS = (0.6, 0.8, 0.95, 1.1)
SEEDS = (0, 1, 2)
UNSEEN_WINDOWS = {
    "unseen-conversation": ("conversation_first60", 3000),
    "unseen-synthetic": ("synthetic_trace", 2500),
}
"""Workload -> file of the trace and its first request."""
WORKLOADS = ("conversation", "synthetic", "agentic", "pauses", "mix", *UNSEEN)
DEVICE_TOKENS = {"qwen2.5-7b-h100": 1_000_000, "llama-3.1-8b-h100": 400_000}
"""Profile -> tokens that about 55 GB of KV hold."""


LONGEST = {"llama-3.1-8b-h100": 131_072}
"""Profile -> tokens of the longest agentic request: the model's context, where the device does
not hold the trace's longest."""


@dataclass(frozen=True)
class Part:
    """The runs of one process."""

    workload: str
    profile: str
    seed: int
    host: float

    @property
    def key(self) -> str:
        return f"{self.workload}-{self.profile}-{self.seed}-host{self.host:g}"

    @property
    def path(self) -> Path:
        return RESULTS / f"{self.key}.json"

    @property
    def arms(self) -> list[Arm]:
        return [a for a in ARMS if a.host == self.host and self.workload in a.workloads]


def parts() -> list[Part]:
    """Yield all runs, every workload before the next seed."""
    hosts = sorted({arm.host for arm in ARMS})
    return [
        Part(workload, profile, seed, host)
        for seed, host, profile, workload in itertools.product(
            SEEDS, hosts, DEVICE_TOKENS, WORKLOADS
        )
        if workload not in UNSEEN or seed == host == 0
    ]


def trace(workload: str, seed: int, data: Path, longest: int | None = None) -> list[TraceRequest]:
    """The requests of one seed; of agents no request of more than ``longest`` tokens, and none of
    its session after it."""
    if workload == "agentic":
        return list(itertools.islice(agents(SESSIONS, seed, data, longest), REQUESTS))
    if workload == "synthetic":
        made = mooncake("synthetic_trace", 0, REQUESTS, data)
        return made if seed == 0 else shuffled(made, seed)
    if workload in UNSEEN:
        file, start = UNSEEN_WINDOWS[workload]
        return mooncake(file, start, REQUESTS, data)
    if workload == "mix":
        chat = conversation(seed, REQUESTS // 2, data)
        return merged(chat, agents(SESSIONS_OF_MIX, seed, data, longest))[:REQUESTS]
    made = conversation(seed, REQUESTS, data)
    return with_pauses(made, PAUSES) if workload == "pauses" else made


def agents(sessions: int, seed: int, data: Path, longest: int | None) -> Iterator[TraceRequest]:
    archive = data / "agentic_coding" / "traces_500.tar.xz"
    made = overlay(archive, sessions, 3600.0, seed)
    return made if longest is None else up_to(made, longest)


def conversation(seed: int, requests: int, data: Path) -> list[TraceRequest]:
    return mooncake("conversation_first60", 1400 * seed, requests, data)


def mooncake(file: str, start: int, requests: int, data: Path) -> list[TraceRequest]:
    trace = open_trace(data / "mooncake" / f"{file}.jsonl", "mooncake")
    return list(itertools.islice(trace, start, start + requests))


def up_to(requests: Iterable[TraceRequest], longest: int) -> Iterator[TraceRequest]:
    """Yield the requests of each session before its first request with more than ``longest`` tokens."""
    over: set[str | None] = set()
    for request in requests:
        if request.input_tokens + request.output_tokens > longest:
            over.add(request.user)
        if request.user not in over:
            yield request


def shuffled(requests: list[TraceRequest], seed: int) -> list[TraceRequest]:
    """Exchange the start times of conversations; gaps between turns stay."""
    starts: dict[str | None, float] = {}
    for request in requests:
        starts.setdefault(request.conversation, request.time_s)
    others = list(starts.values())
    random.Random(seed).shuffle(others)
    moved = dict(zip(starts, others, strict=True))
    made = [
        replace(r, time_s=r.time_s - starts[r.conversation] + moved[r.conversation])
        for r in requests
    ]
    return sorted(made, key=lambda r: r.time_s)


def config(arm: Arm, part: Part, kv_bytes: int) -> SystemConfig:
    """Return an arm's configuration."""
    settings: dict[str, Any] = {
        "device_tokens": DEVICE_TOKENS[part.profile],
        "fixed_outputs": True,  # as in replays and in all previous runs
        **arm.settings,
    }
    if arm.host:
        profile = load_profile(part.profile)
        assert profile.host is not None
        settings["host"] = TierSpec(
            arm.host * settings["device_tokens"] * kv_bytes,
            profile.host.read_bytes_per_s,
            profile.host.write_bytes_per_s,
            policy=settings.get("device_policy", "lru"),
            policy_config=settings.get("device_policy_config", {}),
        )
    return SystemConfig(**settings)


def fingerprint(arm: Arm) -> str:
    """Return a digest of a run's inputs: the arm's settings, the default for waiting requests, and the
    lengths."""
    settings = {"waiting_prefixes": SystemConfig(device_tokens=1).waiting_prefixes, **arm.settings}
    if settings.get("schedule_policy") == "bounded-shortest":
        settings["ranks_by"] = "marginal cost, branches deferred, budgets of who stays behind"
    if settings.get("session_gate") == "footprint":
        settings["arms"] = "by thrash, where the device does not keep up and many fit"
    if settings.get("device_policy") in ("wa", "etlru"):
        settings["categories"] = "with what a turn added"
    text = json.dumps([settings, arm.host, REQUESTS, SESSIONS], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def run_part(part: Part, data: Path, until: float, wanted: frozenset[str]) -> str:
    """Run the missing runs of a part, and write the file after every run."""
    length = {"requests": REQUESTS, "sessions": SESSIONS}
    known: dict[str, Any] = {"length": length, "saturation": None, "runs": {}}
    if part.path.exists():
        found = json.loads(part.path.read_text())
        known = found if found.get("length") == length else known
    missing = [
        (arm, load)
        for arm, load in itertools.product(part.arms, LOADS)
        if arm.key in wanted
        and known["runs"].get(name(arm, load), {}).get("arm") != fingerprint(arm)
    ]
    if not missing or time.time() > until:
        return f"{part.key}: {len(missing)} runs missing"
    requests = CompactTrace(trace(part.workload, part.seed, data, LONGEST.get(part.profile)))
    workload = Workload(requests, seed=part.seed)
    profile = load_profile(part.profile)
    loop = "closed" if part.workload == "agentic" else "turns-wait"

    def system(arm: Arm) -> LoadedSystem:
        made = config(arm, part, profile.kv_bytes_per_token)
        return LoadedSystem(workload, made, profile, loop=loop, keep_stamps=True)

    if known["saturation"] is None:
        known["saturation"] = system(part.arms[0]).saturation(part.seed)
        write(part.path, known)
    done = 0
    for arm, load in missing:
        if time.time() > until:
            break
        made = system(arm).at(load * known["saturation"], part.seed)
        known["runs"][name(arm, load)] = {"arm": fingerprint(arm), **figures(made)}
        write(part.path, known)
        done += 1
    return f"{part.key}: {done} runs made, {len(missing) - done} missing"


def name(arm: Arm, load: float) -> str:
    """Return the key of a run in its part."""
    return f"{arm.key}@{load:g}"


def figures(made: LoadRun) -> dict[str, float]:
    """Return the stored figures of a run, four digits each."""
    latency, system = made.latency, made.system
    kept = {
        "mean": latency.ttft_s.mean,
        "p50": latency.ttft_s.p50,
        "p95": latency.ttft_s.p95,
        "p99": latency.ttft_s.p99,
        "max": latency.ttft_s.max,
        "shortest_mean": latency.deciles[0].ttft_s.mean,
        "longest_mean": latency.deciles[-1].ttft_s.mean,
        "longest_p99": latency.deciles[-1].ttft_s.p99,
        "sessions_per_hour": latency.sessions_per_hour,
        "session_p99": latency.session_s.p99,
        "hits": system.token_hit_ratio,
        **{f"saved_{tier}": s for tier, s in system.prefill_s_saved_by_tier.items()},
    }
    return {key: float(f"{value:.4g}") for key, value in kept.items()}


def write(path: Path, known: dict[str, Any]) -> None:
    """Write one run per line, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    runs = ",\n".join(
        f" {json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(known["runs"].items())
    )
    made = {key: value for key, value in known.items() if key != "runs"}
    text = json.dumps(made)[:-1] + f', "runs": {{\n{runs}\n}}}}\n'
    scratch = path.with_suffix(".tmp")
    scratch.write_text(text)
    scratch.replace(path)
    rows = [{"run": key, **row} for key, row in sorted(known["runs"].items())]
    path.with_suffix(".md").write_text(result_file.tables(rows) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="folder that holds mooncake/ and agentic_coding/"
    )
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so long")
    parser.add_argument("--only", default="", help="parts whose name holds this")
    parser.add_argument("--seeds", default="0,1,2", help="parts of these seeds")
    parser.add_argument("--arms", help="only these arms")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    until = time.time() + args.minutes * 60
    seeds = set(map(int, args.seeds.split(",")))
    wanted = frozenset(args.arms.split(",") if args.arms else [a.key for a in ARMS])
    if unknown := wanted - {arm.key for arm in ARMS}:
        parser.error(f"--arms: there is no arm named {', '.join(sorted(unknown))}")
    chosen = [part for part in parts() if args.only in part.key and part.seed in seeds]
    with ProcessPoolExecutor(args.processes) as pool:
        for said in pool.map(run_part, chosen, itertools.repeat(args.data),
                             itertools.repeat(until), itertools.repeat(wanted)):  # fmt: skip
            print(said, flush=True)


if __name__ == "__main__":
    main()
