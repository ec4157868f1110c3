"""What served.py measured, on the system simulator: do the signs agree, and the sizes?

    python benchmark/latency/served_simulated.py --profile PROFILE.json --data DIR RESULT.json ...

PROFILE is what ``canopy profile`` measured on the machine of the results. The same slices come at the same shares of
saturation, which is that of the simulated first arm, measured in the same way (all of a warm-up's
second half at once). Between two slices nothing comes for as long as the other arms' turns took.
The interval is of the same bootstrap. SGLang's session cache is not simulated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from paired import compared
from served import trace_of
from slices import due_times, rate_of

from canopy_lab.sim.system import SystemConfig, Workload, load_profile, simulate_system
from canopy_lab.sim.system.engine_profile import EngineProfile
from canopy_lab.sim.system.tier_spec import TierSpec
from canopy_lab.trace import TraceRequest, open_trace
from canopy_lab.trace.materialise import Materialiser, Planned, middle_tokens

METRICS = ("mean", "p95", "p99", "hits")
OURS = ("wa", "etlru")
SGLANGS = {"slru": {"protected_share": 1.0}}
"""Settings with which a policy here does what SGLang's of that name does."""
NOT_SIMULATED = "--enable-session-radix-cache"
COPIES_BYTES_PER_S = 4e9
"""Of the link to the host where the profile has none: memory to memory, no accelerator."""


def config_of(arguments: str, about: Mapping[str, Any], profile: EngineProfile) -> SystemConfig:
    """A server's arguments as the simulator's."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--radix-eviction", default="lru")
    add("--radix-eviction-policy-config", type=json.loads, default={})
    add("--schedule-policy", default="fcfs")
    add("--canopy-queue-order", default="sglang")
    add("--chunked-prefill-size", type=int, default=8192)
    add("--hicache-ratio", type=float, default=2.0)
    add("--hicache-write-policy", default="write_through")
    add("--canopy-session-gate", default="off")
    add("--max-running-requests", type=int)
    add("--enable-hierarchical-cache", action="store_true")
    given, _ = parser.parse_known_args([*about["common"], *shlex.split(arguments)])
    ours = given.radix_eviction in OURS or given.radix_eviction.startswith("canopy-")
    name = given.radix_eviction.removeprefix("canopy-") if ours else given.radix_eviction
    settings = {**SGLANGS.get(name, {}), **given.radix_eviction_policy_config}
    policy: dict[str, Any] = {"policy": name, "policy_config": settings}
    host = None
    if given.enable_hierarchical_cache:
        size = given.hicache_ratio * about["kv_tokens"] * profile.kv_bytes_per_token
        speed = profile.host
        read = speed.read_bytes_per_s if speed else COPIES_BYTES_PER_S
        written = speed.write_bytes_per_s if speed else COPIES_BYTES_PER_S
        host = TierSpec(size, read, written, **policy)
    order = given.canopy_queue_order
    # SGLang refreshes waiting prefixes for its own lru; others are touched when they are matched.
    theirs = "touched" if name == "lru" else "matched"
    return SystemConfig(
        device_tokens=about["kv_tokens"],
        device_policy=policy["policy"],
        device_policy_config=policy["policy_config"],
        # Replays fix the lengths of their answers.
        fixed_outputs=True,
        whole_nodes=not ours,
        waiting_prefixes="by-place" if ours else theirs,
        schedule_policy=given.schedule_policy if order == "sglang" else order,
        chunked_prefill_tokens=given.chunked_prefill_size,
        session_gate="none" if given.canopy_session_gate == "off" else "footprint",
        **({"max_running": given.max_running_requests} if given.max_running_requests else {}),
        host=host,
        write_policy=given.hicache_write_policy,
    )


class Sliced:
    """Arrivals of slices: each request at its time, a turn no earlier than the answer before it."""

    def __init__(self, planned: Sequence[Planned], due: Sequence[float]) -> None:
        place = {p.ordinal: i for i, p in enumerate(planned)}
        self._due = due
        self._after: dict[int, int] = {}
        for i, p in enumerate(planned):
            before = place.get(p.previous)  # type: ignore[arg-type]
            if before is not None:
                self._after[before] = i

    def begin(self) -> Sequence[tuple[float, int]]:
        later = set(self._after.values())
        return sorted((t, i) for i, t in enumerate(self._due) if i not in later)

    def answered(self, request: int, end_s: float) -> Sequence[tuple[float, int]]:
        following = self._after.get(request)
        return [] if following is None else [(max(self._due[following], end_s), following)]


def scaled(made: Materialiser, planned: Sequence[Planned]) -> list[TraceRequest]:
    """The requests as the servers saw them."""
    return [
        replace(
            p.request,
            time_s=float(i),
            input_tokens=p.prompt_tokens,
            output_tokens=p.output_tokens,
            block_tokens=made.block_tokens(p.request.block_tokens),
        )
        for i, p in enumerate(planned)
    ]


def simulated(
    made: Materialiser,
    planned: Sequence[Planned],
    due: Sequence[float],
    config: SystemConfig,
    profile: EngineProfile,
) -> Any:
    """One arm."""
    work = Workload(scaled(made, planned), keep_stamps=True)
    return simulate_system(work, config, profile, arrivals=Sliced(planned, due))


def run_load(
    one: Mapping[str, Any],
    about: Mapping[str, Any],
    made: Materialiser,
    planned: Sequence[Planned],
    profile: EngineProfile,
) -> Iterator[tuple[str, dict[str, tuple[float, float, float]]]]:
    """Each arm against the first one."""
    configs = {
        name: config_of(text, about, profile)
        for name, text in about["arms"].items()
        if NOT_SIMULATED not in text
    }
    warm = about["warm_requests"]
    half = warm // 2
    ends = itertools.accumulate(map(len, one["prompt_tokens"]), initial=warm)
    spans = list(itertools.pairwise(ends))
    parts = [planned[a:b] for a, b in spans]
    first = next(iter(configs.values()))
    start = [0.0] * half + [1e4] * (warm - half)
    result = simulated(made, planned[:warm], start, first, profile)
    seconds = result.makespan_s - 1e4
    can = sum(p.prompt_tokens for p in planned[half:warm]) / seconds
    rate = rate_of(parts, one["load"], can)
    due, begin = list(start), 2e4
    for number, part in enumerate(parts):
        due += [begin + t for t in due_times(part, rate, seed=number)]
        begin = due[-1] + (len(configs) - 1) * len(part) / rate + 60.0
    arms: dict[str, list[list[dict[str, Any]]]] = {}
    for name, config in configs.items():
        result = simulated(made, planned, due, config, profile)
        arms[name] = [
            [
                {
                    "ok": True,
                    "ttft_s": float(result.ttft_s[i]),
                    "done_s": float(result.e2e_s[i]),
                    "prompt_tokens": planned[i].prompt_tokens,
                    "cached_tokens": int(result.cached_tokens[i]),
                }
                for i in range(a, b)
            ]
            for a, b in spans
        ]
    base = next(iter(arms.values()))
    for name, rows in list(arms.items())[1:]:
        yield name, compared(base, rows, 1)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--profile", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(), help="where overlays are")
    args = parser.parse_args()
    profile = load_profile(args.profile)
    head = ("load", "arm", *(f"{m}: served | simulated" for m in METRICS))
    print("| " + " | ".join(head) + " |\n|" + "---|" * (len(head) + len(METRICS)))
    for path in args.results:
        known = json.loads(path.read_text())
        about = known["about"]
        dataset, trace = trace_of(argparse.Namespace(**about, data=args.data, out=args.out))
        each = about["warm_requests"] + about["slices"] * about["slice_requests"]
        wanted = itertools.islice(open_trace(trace, dataset), about["skip"], None)
        loads = len(known["loads"])
        made = Materialiser(
            list(itertools.islice(wanted, each * loads)),
            middle_tokens(1 << 15),
            Fraction(about["scale_lengths"]),
        )
        for number, one in enumerate(known["loads"]):
            planned = made.planned[number * each :][:each]
            assert [p.prompt_tokens for p in planned[about["warm_requests"] :]] == [
                n for part in one["prompt_tokens"] for n in part
            ], "other requests than those that were served"
            for name, changes in run_load(one, about, made, planned, profile):
                cells = [f"{_cell(one['changes'][name][m])} | {_cell(changes[m])}" for m in METRICS]
                print(f"| {one['load']:.0%} | {name} | " + " | ".join(cells) + " |", flush=True)
    return 0


def _cell(change: Sequence[float]) -> str:
    value, low, high = (100 * n for n in change)
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


if __name__ == "__main__":
    sys.exit(main())
