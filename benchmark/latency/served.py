"""Two real servers, the same requests, in turns: what an option does to the time to first token.

    python benchmark/latency/served.py --data DIR --model DIR --out DIR --trace conversation \\
        --arm "fcfs=--radix-eviction wa" \\
        --arm "ours=--radix-eviction wa --canopy-queue-order response-ratio" \\
        --loads 0.95 --slices 10 --slice-requests 60

All servers are up at the same time and take turns, slice by slice of the trace, since a machine's
speed may drift by a third between minutes. A slice is sent to every arm (who goes first alternates)
before the next one; each arm's cache goes on from its own last slice. Loads are shares of
saturation: what the first arm serves of the first slice when all of it is sent at once, measured
anew with every load. The intervals are of the bootstrap over slices, paired: each draw takes the
same slices of both arms. Times count from when a request was due.

An arm is ``name=arguments of the server``; the first is what the others are compared with. The
same arguments twice are the placebo: what differs then is noise. ``{out}`` in them is the folder of
the results. See README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from sglang_canopy.bench import client, forced_output, replay_clock
from sglang_canopy.bench.launch import cpu_arguments, free_port, serving
from sglang_canopy.bench.options import labels
from sglang_canopy.bench.schedule import ReplayRequest, Schedule
from sglang_canopy.cli.main import main as canopy
from sglang_canopy.trace import open_trace
from sglang_canopy.trace.materialise import Materialiser, Planned, middle_tokens

DIALECT = client.DIALECTS["sglang"]
DRAWS = 4000
PERCENTILES = (50, 95, 99)


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
        given = ["--archive", args.data / "agentic_coding/traces_500.tar.xz"]
        given += ["--conversations", args.conversations, "--window-s", args.window_s]
        if canopy(["overlay", *map(str, given), "--seed", str(args.seed), "-o", str(path)]) != 0:
            raise SystemExit(2)
    return "agentic", path


def due_times(part: Sequence[Planned], rate: float, seed: int) -> list[float]:
    """Seconds from the slice's start: the trace's own gaps, as fast as ``rate`` requests a second.

    Stamps that several requests share are spread evenly up to the next one.
    """
    stamps = [planned.request.time_s for planned in part]
    spread: list[float] = []
    for time_s, group in itertools.groupby(stamps):
        count = len(list(group))
        later = next((t for t in stamps if t > time_s), time_s)
        spread += [time_s + (later - time_s) * i / count for i in range(count)]
    span = spread[-1] - spread[0]
    if span <= 0.0:  # all at once in the trace: a Poisson process instead
        draw = random.Random(seed)
        return list(itertools.accumulate(draw.expovariate(rate) for _ in part))
    return [(t - spread[0]) / span * len(part) / rate for t in spread]


async def replay(
    arm: Arm, made: Materialiser, part: Sequence[Planned], due: Sequence[float]
) -> tuple[list[dict[str, Any]], float]:
    """Send ``part`` when it is due; returns what came back, and the seconds until all of it had."""
    jobs = [ReplayRequest(p, said) for p, said in zip(part, labels(part, False, 0), strict=True)]
    schedule = Schedule(jobs, due)
    began = time.perf_counter()

    async def send(job: ReplayRequest) -> None:
        custom = {**job.labels, forced_output.KEY: made.output(job.planned)}
        if arm.clock:
            custom[replay_clock.KEY] = [arm.clock, round(job.planned.request.time_s, 6)]
        prompt = made.prompt(job.planned)
        payload = client.body(DIALECT, "served", prompt, job.planned.output_tokens, custom, {})
        job.reply = await client.send(session, arm.url + DIALECT.path, DIALECT, payload, {})
        schedule.answered(job)

    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=3600), connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        tasks = [asyncio.create_task(send(job)) async for job in schedule.arrivals()]
        await asyncio.gather(*tasks)
    return [row(job) for job in jobs], time.perf_counter() - began


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


def figures(slices: Sequence[Sequence[dict[str, Any]]]) -> dict[str, float]:
    """Of all requests of ``slices`` that were answered."""
    rows = [r for part in slices for r in part if r["ok"]]
    ttft = np.array([r["ttft_s"] for r in rows])
    prompts = np.array([r["prompt_tokens"] for r in rows])
    tenth = max(1, len(rows) // 10)
    by_length = np.argsort(prompts, kind="stable")
    found = {"mean": float(ttft.mean())}
    found |= {f"p{p}": float(np.percentile(ttft, p)) for p in PERCENTILES}
    found["max"] = float(ttft.max())
    found["shortest decile"] = float(ttft[by_length[:tenth]].mean())
    found["longest decile"] = float(ttft[by_length[-tenth:]].mean())
    found["done, mean"] = statistics.fmean(r["done_s"] for r in rows)
    found["hits"] = sum(r["cached_tokens"] for r in rows) / max(int(prompts.sum()), 1)
    return found


def compared(
    base: Sequence[Sequence[dict[str, Any]]], other: Sequence[Sequence[dict[str, Any]]], seed: int
) -> dict[str, tuple[float, float, float]]:
    """Change of each figure and its 95 % interval, over slices drawn with replacement. Ratios
    minus one; for hits, the difference."""
    draw = random.Random(seed)
    numbers = range(len(base))
    found: dict[str, list[float]] = {}
    picks = [list(numbers)] + [draw.choices(numbers, k=len(base)) for _ in range(DRAWS)]
    for pick in picks:
        one, two = figures([base[i] for i in pick]), figures([other[i] for i in pick])
        for name in one:
            change = two[name] - one[name] if name == "hits" else two[name] / one[name] - 1.0
            found.setdefault(name, []).append(change)
    return {
        name: (values[0], *map(float, np.percentile(values[1:], [2.5, 97.5])))
        for name, values in found.items()
    }


def table(load: float, arms: Sequence[Arm], rate: float, seconds: dict[str, float]) -> str:
    """One load as Markdown."""
    count = sum(len(part) for part in arms[0].slices)
    lines = [
        f"\n## {load:.0%} of saturation ({rate:.2f} requests/s), {len(arms[0].slices)} slices, "
        f"{count} requests an arm\n",
        "| arm | " + " | ".join(figures(arms[0].slices)) + " | all answered after, s |",
        "|---|" + "---:|" * (len(figures(arms[0].slices)) + 1),
    ]
    for arm in arms:
        cells = [
            f"{value:.1%}" if name == "hits" else f"{value:.2f}"
            for name, value in figures(arm.slices).items()
        ]
        lines.append(f"| {arm.name} | " + " | ".join(cells) + f" | {seconds[arm.name]:.1f} |")
    for arm in arms[1:]:
        changes = compared(arms[0].slices, arm.slices, seed=1)
        cells = [
            f"{100 * value:+.0f} [{100 * low:+.0f}, {100 * high:+.0f}]"
            for value, low, high in changes.values()
        ]
        lines.append(f"| {arm.name} to {arms[0].name}, % | " + " | ".join(cells) + " | |")
    return "\n".join(lines)


async def run(args: argparse.Namespace, arms: list[Arm]) -> dict[str, Any]:
    """Every load, slice by slice, the arms in turns."""
    dataset, path = trace_of(args)
    wanted = args.skip + args.slice_requests * (1 + args.slices) * len(args.loads)
    requests = list(itertools.islice(open_trace(path, dataset), wanted))[args.skip :]
    made = Materialiser(requests, middle_tokens(args.vocab_size), args.scale_lengths)
    parts = [
        made.planned[i : i + args.slice_requests]
        for i in range(0, len(made.planned) - args.slice_requests + 1, args.slice_requests)
    ]
    result: dict[str, Any] = {"command": sys.argv, "trace": args.trace, "loads": []}
    at = iter(parts)
    for load in args.loads:
        first = next(at, None)
        rates = {}
        for arm in (
            arms if first else ()
        ):  # all of it at once: what the server can do, and a warm-up
            _, seconds = await replay(arm, made, first, [0.0] * len(first))
            rates[arm.name] = len(first) / seconds
            arm.slices = []
        if not rates:
            raise SystemExit(f"the trace has {len(requests)} requests, {wanted} are needed")
        rate = load * rates[arms[0].name]
        spent = dict.fromkeys(rates, 0.0)
        for number, part in enumerate(itertools.islice(at, args.slices)):
            due = due_times(part, rate, seed=number)
            for arm in arms if number % 2 else arms[::-1]:
                rows, seconds = await replay(arm, made, part, due)
                arm.slices.append(rows)
                spent[arm.name] += seconds
            print(
                f"slice {number + 1}: "
                + ", ".join(f"{a.name} {figures(a.slices[-1:])['mean']:.2f} s" for a in arms),
                file=sys.stderr,
                flush=True,
            )
        print(table(load, arms, rate, spent), flush=True)
        errors = [r["error"] for a in arms for part in a.slices for r in part if not r["ok"]]
        if errors:
            print(f"\n{len(errors)} requests failed, the first: {errors[0]}")
        result["loads"].append(
            {
                "load": load,
                "saturation_requests_a_second": rates,
                "seconds": spent,
                "failed": len(errors),
                "figures": {arm.name: figures(arm.slices) for arm in arms},
                "changes": {a.name: compared(arms[0].slices, a.slices, 1) for a in arms[1:]},
                "slices": {arm.name: arm.slices for arm in arms} if args.details else None,
            }
        )
    return result


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with mooncake/, ...")
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    parser.add_argument("--arm", type=arm_of, action="append", required=True, dest="arms")
    parser.add_argument("--common", type=shlex.split, default=[], help="arguments of every arm")
    parser.add_argument("--trace", choices=["conversation", "synthetic", "agentic"], required=True)
    parser.add_argument("--loads", type=_numbers, default="0.95", help="of saturation: 0.7,0.95")
    parser.add_argument("--slices", type=int, default=10)
    parser.add_argument("--slice-requests", type=int, default=60)
    parser.add_argument("--skip", type=int, default=0, help="requests of the trace to leave out")
    parser.add_argument("--kv-tokens", type=int, default=16_384, help="pool of each server")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--scale-lengths", type=Fraction, default=Fraction(1, 64))
    parser.add_argument("--vocab-size", type=int, default=1 << 15)
    parser.add_argument("--trace-clock", action="store_true", help="policies see the trace's times")
    parser.add_argument("--details", action="store_true", help="keep every request's figures")
    parser.add_argument("--conversations", type=int, default=40, help="of an overlay")
    parser.add_argument("--window-s", type=float, default=1440, help="of an overlay")
    parser.add_argument("--seed", type=int, default=1, help="of an overlay")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        for number, arm in enumerate(args.arms):
            arguments = cpu_arguments(args.model, kv_tokens=args.kv_tokens, dtype=args.dtype)
            if not (args.model / "model.safetensors").exists():
                arguments += ["--load-format", "dummy"]
            arguments += ["--canopy-enable-forced-output", *args.common]
            arguments += [text.replace("{out}", str(args.out)) for text in arm.arguments]
            log = args.out / f"server-{arm.name}.log"
            server = stack.enter_context(
                serving(arguments, log=log, port=free_port(), describe=arm.name, patience_s=1.0)
            )
            arm.url = server.url
            if args.trace_clock:
                arm.clock = time.time_ns() // 1000 + number
        result = asyncio.run(run(args, args.arms))
    (args.out / f"served-{args.trace}.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _numbers(text: str) -> list[float]:
    return [float(n) for n in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
