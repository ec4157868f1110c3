"""Two or more real servers, the same requests, in turns: what an option does to TTFT.

    python benchmark/latency/served.py --data DIR --model DIR --out DIR --trace conversation \\
        --arm "fcfs=--radix-eviction wa" \\
        --arm "ours=--radix-eviction wa --canopy-queue-order bounded-shortest" \\
        --loads 0.95 --slices 10 --slice-requests 60

All servers are up at the same time and take turns, slice by slice of the trace, since a machine's
speed may drift by a third between minutes. A slice is sent to every arm before the next one; who
goes first changes; each arm's cache goes on from its own last slice. Loads are shares of
saturation: the prompt tokens a second that the first arm serves when the second half of
``--warm-requests`` is sent at once, measured anew with every load. The intervals are of the
bootstrap over slices, paired: each draw takes the same slices of both arms. Slices are cut to have
about as many prompt tokens each. Times count from when a request was due. With ``--closed-loop``
a turn is due when the one before it was answered and the client has thought; what counts then is
when all of a slice is answered.

Queues grow only where one step cannot take them whole: scale ``--chunked-prefill-size`` with the
lengths (8192 / 64 = 128). A slice begins with an empty queue, so short slices understate queues.

An arm is ``name=arguments of the server``; the first is what the others are compared with. The
same arguments twice are the placebo: what differs then is noise. ``{out}`` in them is the folder of
the results. One with ``--enable-session-radix-cache`` is told each request's session, and its end
within the requests sent. A result is written after every load, and the slices of one that was ended
beside it; the same command goes on with the next load. See README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import importlib.metadata
import itertools
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import aiohttp
from paired import TIME, Result, compared, figures, ratio, table
from slices import balanced, due_times, rate_of, turn

from canopy_lab.live.replay import client
from canopy_lab.live.replay.options import closed_loop, labels
from canopy_lab.live.replay.schedule import ReplayRequest, Schedule
from canopy_lab.trace import open_trace
from canopy_lab.trace.materialise import Materialiser, Planned, middle_tokens
from sglang_canopy.wire import replay_clock
from sglang_canopy.wire.stamp import FORCE_OUTPUT

sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))
from make_overlay import main as make_overlay

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from launch_server import cpu_arguments, cpu_dtype, free_port, serving

DIALECT = client.DIALECTS["sglang"]
THINK_CAP_S = 300.0
"""Of a closed loop: longest time to think, before scaling."""
STARTS = 3
"""Servers that start at the same time."""


@dataclass(slots=True)
class Arm:
    """One server."""

    name: str
    arguments: list[str]
    url: str = ""
    clock: int = 0
    """Tells its replay's clock from another's; 0: time is the server's own."""
    slices: list[list[dict[str, Any]]] = field(default_factory=list)
    """Of the load under way: each slice's requests."""
    seconds: list[float] = field(default_factory=list)
    """Of the load under way: until each slice was answered."""

    @property
    def sessions(self) -> bool:
        """Whether it is told of sessions and their ends, which SGLang's session cache needs."""
        return "--enable-session-radix-cache" in self.arguments


def arm_of(text: str) -> Arm:
    """``name=arguments``."""
    name, found, arguments = text.partition("=")
    if not found or not name:
        raise argparse.ArgumentTypeError(
            f"must be NAME=ARGUMENTS, such as 'ours=--radix-eviction wa', got {text!r}"
        )
    return Arm(name, shlex.split(arguments))


def trace_of(args: argparse.Namespace) -> tuple[str, Path]:
    """Dataset and file; an agentic overlay is made where it is missing."""
    if args.trace != "agentic":
        file = {"conversation": "conversation_first60", "synthetic": "synthetic_trace"}[args.trace]
        return "mooncake", args.data / f"mooncake/{file}.jsonl"
    path = args.out / f"overlay-{args.conversations}-{args.window_s:g}-{args.seed}.jsonl.gz"
    if not path.exists():
        given = ["--own-prefixes", "--archive", args.data / "agentic_coding/traces_500.tar.xz"]
        given += ["--conversations", args.conversations, "--window-s", args.window_s]
        if make_overlay([*map(str, given), "--seed", str(args.seed), "-o", str(path)]) != 0:
            raise SystemExit(2)
    return "agentic", path


async def replay(
    arm: Arm,
    made: Materialiser,
    part: Sequence[Planned],
    due: Sequence[float],
    think_scale: float | None = None,
) -> tuple[list[dict[str, Any]], float]:
    """Send ``part`` when it is due; returns what came back, and the seconds until all of it had.

    ``think_scale``: makes it a closed loop, whose times to think are the trace's, scaled.
    """
    jobs = [ReplayRequest(p, said) for p, said in zip(part, labels(part, False, 0), strict=True)]
    loop = None if think_scale is None else closed_loop(jobs, think_scale, THINK_CAP_S)
    schedule = Schedule(jobs, due, loop=loop)
    ends = set({p.request.conversation: p.ordinal for p in made.planned}.values())
    began = time.perf_counter()

    async def ask(job: ReplayRequest, session: aiohttp.ClientSession) -> None:
        named = job.planned.request.conversation if arm.sessions else None
        await send(arm, made, job, session, {} if named is None else {"session_id": named})
        if named is not None and job.planned.ordinal in ends:
            async with session.post(f"{arm.url}/close_session", json={"session_id": named}) as told:
                told.raise_for_status()

    await send_all(schedule, ask)
    return [row(job) for job in jobs], time.perf_counter() - began


async def send(
    arm: Arm,
    made: Materialiser,
    job: ReplayRequest,
    session: aiohttp.ClientSession,
    extra: Mapping[str, Any],
) -> None:
    """Ask ``arm`` for one request, with ``extra`` fields in its body; the job has the reply then."""
    custom = {**job.labels, FORCE_OUTPUT: made.output(job.planned)}
    if arm.clock:
        custom[replay_clock.KEY] = [arm.clock, round(job.planned.request.time_s, 6)]
    prompt = made.prompt(job.planned)
    payload = client.body(DIALECT, "served", prompt, job.planned.output_tokens, custom, extra)
    job.reply = await client.send(session, arm.url + DIALECT.path, DIALECT, payload, {})


async def send_all(
    schedule: Schedule, ask: Callable[[ReplayRequest, aiohttp.ClientSession], Awaitable[None]]
) -> None:
    """``ask`` for every job when it is due, until all are answered."""

    async def one(job: ReplayRequest) -> None:
        await ask(job, session)
        schedule.answered(job)

    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=3600), connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        tasks = [asyncio.create_task(one(job)) async for job in schedule.arrivals()]
        await asyncio.gather(*tasks)


def row(job: ReplayRequest) -> dict[str, Any]:
    """One request's figures. Seconds from when it was due."""
    reply = job.reply
    return {
        "ok": reply.ok,
        "error": reply.error,
        "ttft_s": (reply.first_s or reply.done_s) - job.due_s,
        "done_s": reply.done_s - job.due_s,
        "prompt_tokens": job.planned.prompt_tokens,
        "cached_tokens": reply.cached_tokens or 0,
        "conversation": job.planned.request.conversation,
    }


async def run(args: argparse.Namespace, arms: list[Arm], result: Result) -> None:
    """Every load, slice by slice, the arms in turns."""
    dataset, path = trace_of(args)
    each = args.warm_requests + args.slices * args.slice_requests
    wanted = args.skip + each * len(args.loads)
    requests = list(itertools.islice(open_trace(path, dataset), wanted))[args.skip :]
    if len(requests) + args.skip < wanted:
        raise SystemExit(f"the trace has {len(requests) + args.skip} requests, {wanted} are needed")
    made = Materialiser(requests, middle_tokens(args.vocab_size), args.scale_lengths)
    for number, load in enumerate(args.loads):
        if not result.has(load):
            planned = made.planned[number * each :][:each]
            one = await run_load(args, arms, made, load, planned, result)
            result.add(one)
            print(table(one), flush=True)


async def run_load(
    args: argparse.Namespace,
    arms: list[Arm],
    made: Materialiser,
    load: float,
    planned: Sequence[Planned],
    result: Result,
) -> dict[str, Any]:
    """One load; what there is of it is noted after every slice."""
    began = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    warm, rest = planned[: args.warm_requests], planned[args.warm_requests :]
    half = len(warm) // 2
    can: dict[str, float] = {}
    for arm in arms:
        arm.slices, arm.seconds = [], []
        await replay(arm, made, warm[:half], [0.0] * half)
        _, seconds = await replay(arm, made, warm[half:], [0.0] * (len(warm) - half))
        can[arm.name] = sum(p.prompt_tokens for p in warm[half:]) / seconds
    parts = balanced(rest, args.slices)
    rate = rate_of(parts, load, can[arms[0].name])
    for number, part in enumerate(parts):
        if args.before_slice:
            subprocess.run(args.before_slice, shell=True, check=True)
        due = due_times(part, rate, seed=number)
        for arm in turn(arms, number):
            think = args.think_scale if args.closed_loop else None
            rows, seconds = await replay(arm, made, part, due, think)
            arm.slices.append(rows)
            arm.seconds.append(seconds)
        means = ", ".join(f"{a.name} {figures(a.slices[-1:])['mean']:.2f} s" for a in arms)
        print(f"{load:.0%}, slice {number + 1}: {means}", file=sys.stderr, flush=True)
        one = {"load": load, "began": began, "requests_a_second": rate}
        one |= {"saturation_tokens_a_second": can, **measured(arms, parts[: number + 1])}
        result.note(one)
    return one | {"changes": changes(arms)}


def measured(arms: Sequence[Arm], parts: Sequence[Sequence[Planned]]) -> dict[str, Any]:
    """What came of the slices so far."""
    errors = [r["error"] for a in arms for part in a.slices for r in part if not r["ok"]]
    return {
        "slices": len(parts),
        "requests": sum(map(len, parts)),
        "seconds": {arm.name: sum(arm.seconds) for arm in arms},
        "slice_seconds": {arm.name: list(arm.seconds) for arm in arms},
        "failed": len(errors),
        "error": errors[0] if errors else None,
        "figures": {arm.name: figures(arm.slices) for arm in arms},
        "prompt_tokens": [[p.prompt_tokens for p in part] for part in parts],
        "ttft_ms": {arm.name: kept(arm, "ttft_s", 1000) for arm in arms},
        "cached_tokens": {arm.name: kept(arm, "cached_tokens") for arm in arms},
    }


def changes(arms: Sequence[Arm]) -> dict[str, Any]:
    """Each arm against the first one."""
    base = arms[0]
    return {
        a.name: {
            **compared(base.slices, a.slices, 1),
            TIME: ratio(base.seconds, a.seconds, 1),
        }
        for a in arms[1:]
    }


def kept(arm: Arm, name: str, factor: int = 1) -> list[list[int | None]]:
    """One figure of every request, slice by slice; none where it failed."""
    return [[round(factor * r[name]) if r["ok"] else None for r in part] for part in arm.slices]


def about(args: argparse.Namespace) -> dict[str, Any]:
    """What a result is of."""
    names = ("common", "trace", "slices", "slice_requests", "warm_requests", "skip", "kv_tokens")
    names += ("trace_clock", "conversations", "window_s", "seed", "closed_loop", "think_scale")
    cpu = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((n.partition(": ")[2] for n in lines if n.startswith("model name")), cpu)
    return {
        "arms": {arm.name: shlex.join(arm.arguments) for arm in args.arms},
        **{name: getattr(args, name) for name in names},
        "model": args.model.name,
        "dtype": args.dtype or cpu_dtype(),
        "scale_lengths": str(args.scale_lengths),
        "sglang": importlib.metadata.version("sglang"),
        "cpu": f"{cpu}, {os.cpu_count()} cores, {os.environ.get('OMP_NUM_THREADS', 'all')} of "
        "them for each model",
    }


def start(args: argparse.Namespace, stack: contextlib.ExitStack) -> None:
    """Start every arm's server."""

    def one(number: int, arm: Arm, port: int) -> None:
        arguments = cpu_arguments(args.model, kv_tokens=args.kv_tokens, dtype=args.dtype)
        if not (args.model / "model.safetensors").exists():
            arguments += ["--load-format", "dummy"]
        arguments += ["--canopy-enable-forced-output", *args.common]
        arguments += [text.replace("{out}", str(args.out)) for text in arm.arguments]
        log = args.out / f"server-{arm.name}.log"
        server = stack.enter_context(
            serving(arguments, log=log, port=port, deadline_s=600.0, patience_s=1.0)
        )
        arm.url = server.url
        if args.trace_clock:
            arm.clock = time.time_ns() // 1000 + number

    ports = [free_port() for _ in args.arms]
    with ThreadPoolExecutor(STARTS) as pool:
        list(pool.map(one, range(len(ports)), args.arms, ports))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with mooncake/, ...")
    add("--out", type=Path, required=True, help="folder for results and logs")
    add("--name", help="of the result in it; by default served-TRACE")
    add("--model", type=Path, required=True, help="model directory")
    add("--arm", type=arm_of, action="append", required=True, dest="arms")
    add("--common", type=shlex.split, default=[], help="arguments of every arm")
    add("--trace", choices=["conversation", "synthetic", "agentic"], required=True)
    add("--loads", type=_numbers, default="0.95", help="of saturation: 0.7,0.95")
    add("--slices", type=int, default=10)
    add("--slice-requests", type=int, default=60, help="on average; a slice is of equal tokens")
    add("--before-slice", help="command before each slice, such as one that waits for quiet")
    add("--warm-requests", type=int, default=60, help="before a load; half of them is timed")
    add("--closed-loop", action="store_true", help="a turn comes after the answer and the thought")
    add("--think-scale", type=float, default=1.0, help="of a closed loop: times to think")
    add("--skip", type=int, default=0, help="requests of the trace to leave out")
    add("--kv-tokens", type=int, default=16_384, help="pool of each server")
    add("--dtype", default=None)
    add("--scale-lengths", type=Fraction, default=Fraction(1, 64))
    add("--vocab-size", type=int, default=1 << 15)
    add("--trace-clock", action="store_true", help="policies see the trace's times")
    add("--conversations", type=int, default=40, help="of an overlay")
    add("--window-s", type=float, default=1440, help="of an overlay")
    add("--seed", type=int, default=1, help="of an overlay")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    result = Result(args.out / f"{args.name or f'served-{args.trace}'}.json", about(args))
    if all(result.has(load) for load in args.loads):
        print("\n".join(table(one) for one in result.made["loads"]))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its servers end with it
    with contextlib.ExitStack() as stack:
        start(args, stack)
        asyncio.run(run(args, args.arms, result))
    return 0


def _numbers(text: str) -> list[float]:
    return [float(n) for n in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
