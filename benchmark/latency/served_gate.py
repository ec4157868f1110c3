"""Real servers at the cliff: agents in a closed loop, with and without a session gate.

    OMP_NUM_THREADS=1 python benchmark/latency/served_gate.py --data DIR --model DIR --out OUT \\
        --common="--chunked-prefill-size 128" --kv-tokens 2048 --sessions 10 --slices 10 \\
        --arm "lru=" --arm "running=--max-running-requests 3" --arm "cap=" --at-once cap=4 \\
        --arm "gate=--radix-eviction canopy-lru --canopy-session-gate auto"
    python benchmark/latency/served_gate.py --data DIR --simulate OUT/served-gate.json \\
        --profile benchmark/latency/results/served/profile.json

A slice is ``--sessions`` agents of the archive, each up to the first prompt beyond ``--context``
and for at most ``--turns`` turns. They begin at random at ``--rate`` an hour; a turn is sent after
the answer to the one before it and the time to think. All servers are up and take turns, slice by
slice; a slice has ended when all of it is answered. ``--at-once NAME=K`` holds sessions back at
the client, so that at most K of an arm's are under way: the static cap that a gate has to beat. It
knows when a session has ended, which no gate is told here.

TTFT counts from when a turn was due, so what it waited at the client or the gate is in it. The
intervals are of the bootstrap over slices, paired. The second form runs the same sessions on the
simulator: as many slices. A result is written after every slice; the same command goes on after
the last one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from paired import ratio
from served import Arm, about, arm_of, send, send_all, start
from served_simulated import config_of, scaled
from slices import turn

from canopy_lab.live.replay.options import closed_loop, labels, session_offsets_s
from canopy_lab.live.replay.schedule import ReplayRequest, Schedule
from canopy_lab.sim.system import Workload, load_profile, simulate_system
from canopy_lab.trace.materialise import Materialiser, Planned, middle_tokens
from canopy_lab.trace.record import TraceRequest
from canopy_lab.trace.sessions import SessionLinks

sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))
from overlays import overlay

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from launch_server import cpu_dtype

ARCHIVE = "agentic_coding/traces_500.tar.xz"
CONVERSATIONS = 400
SHORTEST = 3
"""Turns that a session must have to be taken."""
APART_S = 10_000.0
"""Simulated seconds between two slices."""
FIGURES = ("all answered, s", "mean TTFT, s", "P99 TTFT, s", "mean session, s", "hits")


def sessions(args: argparse.Namespace) -> list[list[TraceRequest]]:
    """Those that are replayed, slice after slice; the warm-up's come first."""
    found: dict[str, list[TraceRequest]] = {}
    for request in overlay(
        args.data / ARCHIVE, CONVERSATIONS, 7200.0, args.seed, own_prefixes=True
    ):
        if request.user is not None:
            found.setdefault(request.user, []).append(request)
    longest = args.context / args.scale_lengths
    taken = []
    for turns in found.values():
        fit = [r.input_tokens + r.output_tokens <= longest for r in turns[: args.turns]]
        count = fit.index(False) if False in fit else len(fit)
        if count >= SHORTEST:
            taken.append(turns[:count])
    wanted = args.sessions * (args.slices + 1)
    if len(taken) < wanted:
        raise SystemExit(f"{wanted} sessions are wanted, {len(taken)} fit: take fewer slices")
    return taken[:wanted]


def plan(args: argparse.Namespace) -> tuple[Materialiser, list[list[Planned]]]:
    """The requests, and those of each slice, which are in order of the trace's time."""
    chosen = sessions(args)
    made = Materialiser(
        sorted((r for turns in chosen for r in turns), key=lambda r: r.time_s),
        middle_tokens(args.vocab_size),
        args.scale_lengths,
    )
    slice_of = {turns[0].user: number // args.sessions for number, turns in enumerate(chosen)}
    parts: list[list[Planned]] = [[] for _ in range(args.slices + 1)]
    for planned in made.planned:
        parts[slice_of[planned.request.user]].append(planned)
    return made, parts


def links_of(args: argparse.Namespace, part: Sequence[Planned]) -> SessionLinks:
    """What follows what, after how long."""
    jobs = [ReplayRequest(p, {}) for p in part]
    return closed_loop(jobs, args.think_scale, args.think_cap)


async def replay(
    args: argparse.Namespace, arm: Arm, made: Materialiser, part: Sequence[Planned], seed: int
) -> dict[str, Any]:
    """One slice on one server."""
    jobs = [ReplayRequest(p, said) for p, said in zip(part, labels(part, False, 0), strict=True)]
    links = links_of(args, part)
    schedule = Schedule(jobs, session_offsets_s(links, args.rate, seed), loop=links)
    left = Counter(links.first)
    free = asyncio.Semaphore(args.at_once.get(arm.name, len(jobs)))
    place = {job.planned.ordinal: i for i, job in enumerate(jobs)}
    began = time.perf_counter()

    async def ask(job: ReplayRequest, session: aiohttp.ClientSession) -> None:
        index = place[job.planned.ordinal]
        first = links.first[index]
        if index == first:
            await free.acquire()
        await send(arm, made, job, session, {})
        left[first] -= 1
        if not left[first]:
            free.release()

    await send_all(schedule, ask)
    failed = [job.reply.error for job in jobs if not job.reply.ok]
    if failed:
        raise SystemExit(f"{len(failed)} requests to {arm.name} failed, the first: {failed[0]}")
    return {
        "seconds": time.perf_counter() - began,
        "ttft_s": [round(job.reply.first_s - job.due_s, 4) for job in jobs],
        "done_s": [round(job.reply.done_s - jobs[0].due_s, 4) for job in jobs],
        "due_s": [round(job.due_s - jobs[0].due_s, 4) for job in jobs],
        "cached_tokens": [job.reply.cached_tokens or 0 for job in jobs],
        "prompt_tokens": [p.prompt_tokens for p in part],
        "first": links.first,
    }


def figures(slices: Sequence[Mapping[str, Any]]) -> list[float]:
    """``FIGURES`` of some slices."""
    ttft = np.concatenate([one["ttft_s"] for one in slices])
    lasted = []
    for one in slices:
        ends: dict[int, float] = {}
        for first, done in zip(one["first"], one["done_s"], strict=True):
            ends[first] = max(ends.get(first, 0.0), done)
        lasted += [end - one["due_s"][first] for first, end in ends.items()]
    prompts = sum(sum(one["prompt_tokens"]) for one in slices)
    return [
        sum(one["seconds"] for one in slices),
        float(ttft.mean()),
        float(np.percentile(ttft, 99)),
        statistics.fmean(lasted),
        sum(sum(one["cached_tokens"]) for one in slices) / prompts,
    ]


def table(made: Mapping[str, Any]) -> Iterator[str]:
    """A result as Markdown; changes are against the first arm, in %, hits in points."""
    slices: Mapping[str, Sequence[Mapping[str, Any]]] = made["slices"]
    base = next(iter(slices.values()))
    count = min(map(len, slices.values()))
    if not count:
        return
    requests = sum(len(one["ttft_s"]) for one in base[:count])
    yield f"{count} slices, {requests} requests an arm\n"
    yield "| arm | " + " | ".join(FIGURES) + " |\n|---|" + "---:|" * len(FIGURES)
    for name, rows in slices.items():
        cells = [f"{value:.2f}" for value in figures(rows[:count])]
        if rows is not base:
            cells = [f"{c} ({_change(base, rows, i, count)})" for i, c in enumerate(cells)]
        yield f"| {name} | " + " | ".join(cells) + " |"


def _change(base: Sequence[Any], rows: Sequence[Any], figure: int, count: int) -> str:
    """Change of one figure, with its interval: ``paired.ratio`` drawn over slices."""
    if figure in (0, 1, 3):  # sums: as many requests and sessions in both
        weight = [len(one["ttft_s"]) if figure == 1 else 1 for one in base[:count]]
        one, two = (
            [figures([part])[figure] * w for part, w in zip(arm[:count], weight, strict=True)]
            for arm in (base, rows)
        )
        found = ratio(one, two, 1)
        return f"{100 * found[0]:+.0f} [{100 * found[1]:+.0f}, {100 * found[2]:+.0f}]"
    one, two = figures(base[:count])[figure], figures(rows[:count])[figure]
    return f"{100 * (two - one):+.0f}" if figure == 4 else f"{100 * (two / one - 1):+.0f}"


async def run(args: argparse.Namespace, path: Path, made: dict[str, Any]) -> None:
    """Every slice, the arms in turns; the first slice warms up and does not count."""
    texts, parts = plan(args)
    done = min(map(len, made["slices"].values()))
    for arm in args.arms:
        await replay(args, arm, texts, parts[0], 0)
        print(f"{arm.name} is warm", file=sys.stderr, flush=True)
    for number in range(done, args.slices):
        found = {
            arm.name: await replay(args, arm, texts, parts[number + 1], number + 1)
            for arm in turn(args.arms, number)
        }
        for name, one in found.items():
            made["slices"][name].append(one)
        _write(path, made)
        said = ", ".join(f"{n} {one['seconds']:.0f} s" for n, one in found.items())
        print(f"slice {number + 1}: {said}", file=sys.stderr, flush=True)


class Sliced:
    """Simulated arrivals: slices far apart, in each a closed loop with the served one's starts."""

    def __init__(self, args: argparse.Namespace, parts: Sequence[Sequence[Planned]]) -> None:
        self._starts: list[tuple[float, int]] = []
        self._after: dict[int, list[tuple[float, int]]] = {}
        self.began: dict[int, float] = {}
        """Of each slice's first request: when its slice began."""
        at = 0
        for number, part in enumerate(parts):
            links = links_of(args, part)
            offsets = session_offsets_s(links, args.rate, number)
            for i, before in enumerate(links.before):
                if before < 0:
                    self._starts.append((number * APART_S + offsets[i], at + i))
                else:
                    self._after.setdefault(at + before, []).append((links.think_s[i], at + i))
            self.began[at] = number * APART_S
            at += len(part)

    def begin(self) -> Sequence[tuple[float, int]]:
        return sorted(self._starts)

    def answered(self, request: int, end_s: float) -> Sequence[tuple[float, int]]:
        return [(end_s + think, i) for think, i in self._after.get(request, ())]


def simulate(args: argparse.Namespace) -> int:
    """A result's sessions on the simulator, as a result of the same form."""
    known = json.loads(args.simulate.read_text())
    said = known["about"]
    for name, value in said["sessions_of"].items():
        setattr(args, name, value)
    args.scale_lengths = Fraction(said["scale_lengths"])
    made, parts = plan(args)
    served = min(map(len, known["slices"].values()))
    profile = load_profile(str(args.profile))
    flat = [p for part in parts for p in part]
    trace = scaled(made, flat)
    result: dict[str, Any] = {"slices": {}}
    for name, text in said["arms"].items():
        config = config_of(text, said, profile)
        if name in said["at_once"]:
            cap = {"sessions": said["at_once"][name], "idle_s": args.think_cap * args.think_scale}
            config = replace(config, session_gate="static", session_gate_config=cap)
        arrivals = Sliced(args, parts)
        work = Workload(trace, keep_stamps=True)
        got = simulate_system(work, config, profile, arrivals=arrivals, seed=0)
        result["slices"][name] = list(_slices(args, parts, got))[1 : served + 1]
    print("\n".join(table(result)))
    return 0


def _slices(args: argparse.Namespace, parts: Sequence[Any], got: Any) -> Iterator[dict[str, Any]]:
    at = 0
    for number, part in enumerate(parts):
        places = slice(at, at + len(part))
        at = places.stop
        due = got.due_s[places] - number * APART_S
        done = due + got.e2e_s[places]
        yield {
            "seconds": float(done.max()),
            "ttft_s": got.ttft_s[places].tolist(),
            "done_s": (done - due[0]).tolist(),
            "due_s": (due - due[0]).tolist(),
            "cached_tokens": got.cached_tokens[places].tolist(),
            "prompt_tokens": [p.prompt_tokens for p in part],
            "first": links_of(args, part).first,
        }


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help=f"folder with {ARCHIVE}")
    add("--out", type=Path, help="folder for the result and logs")
    add("--name", default="served-gate", help="of the result in it")
    add("--model", type=Path, help="model directory")
    add("--arm", type=arm_of, action="append", default=[], dest="arms", help="NAME=ARGUMENTS")
    add("--at-once", type=_cap, action="append", default=[], help="NAME=K: at most K sessions")
    add("--common", type=shlex.split, default=[], help="arguments of every arm")
    add("--slices", type=int, default=10)
    add("--sessions", type=int, default=10, help="a slice")
    add("--turns", type=int, default=12, help="most of a session")
    add("--context", type=int, default=600, help="most tokens of a session, scaled")
    add("--rate", type=float, default=3600.0, help="sessions an hour")
    add("--think-cap", type=float, default=20.0, help="longest time to think, s, before scaling")
    add("--think-scale", type=float, default=0.05)
    add("--kv-tokens", type=int, default=2048, help="pool of each server")
    add("--dtype", default=None)
    add("--scale-lengths", type=Fraction, default=Fraction(1, 64))
    add("--vocab-size", type=int, default=1 << 15)
    add("--seed", type=int, default=1, help="of the overlay")
    add("--simulate", type=Path, metavar="RESULT", help="run a result's sessions simulated")
    add("--profile", type=Path, help="of the machine that the result is from")
    args = parser.parse_args()
    args.at_once = dict(args.at_once)
    if args.simulate:
        return simulate(args)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{args.name}.json"
    known = json.loads(json.dumps(_about(args)))
    made = {"about": known, "slices": {arm.name: [] for arm in args.arms}}
    if path.exists():
        made = json.loads(path.read_text())
        if made["about"] != known:
            raise SystemExit(f"{path} is of other arguments; give another --name, or remove it")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its servers end with it
    if min(map(len, made["slices"].values())) < args.slices:
        with contextlib.ExitStack() as stack:
            start(args, stack)
            asyncio.run(run(args, path, made))
    print("\n".join(table(made)))
    return 0


def _about(args: argparse.Namespace) -> dict[str, Any]:
    names = ("slices", "sessions", "turns", "context", "rate", "think_cap", "think_scale", "seed")
    rest = {"warm_requests": 0, "slice_requests": 0, "skip": 0, "trace_clock": False}
    rest |= {"trace": "agentic", "conversations": CONVERSATIONS, "window_s": 7200.0}
    args.trace_clock, args.closed_loop = False, True
    told = about(argparse.Namespace(**{**rest, **vars(args)}))
    told |= {"dtype": args.dtype or cpu_dtype(), "at_once": args.at_once}
    return told | {"sessions_of": {n: getattr(args, n) for n in (*names, "vocab_size")}}


def _cap(text: str) -> tuple[str, int]:
    name, _, most = text.partition("=")
    if not name or not most.isdigit() or int(most) < 1:
        raise argparse.ArgumentTypeError(f"must be NAME=K with K of 1 or more, got {text!r}")
    return name, int(most)


def _write(path: Path, made: Mapping[str, Any]) -> None:
    beside = path.with_suffix(".part")
    beside.write_text(f"{json.dumps(made)}\n")
    beside.replace(path)


if __name__ == "__main__":
    sys.exit(main())
