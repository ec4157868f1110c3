"""SGLang's own scheduler with a real model, on a clock that other programs cannot disturb.

    OMP_NUM_THREADS=1 PYTHONPATH=test python benchmark/latency/stepped.py --data DIR --model DIR \\
        --out FILE --trace conversation --skip 3000 --loads 1.1 --slices 8 --slice-requests 250 \\
        --arm "fcfs=--radix-eviction wa" \\
        --arm "ours=--radix-eviction wa --canopy-queue-order bounded-shortest"

There is no HTTP: each arm is a process that steps the scheduler (``SteppedScheduler``), and its clock is the
CPU time of the process plus the time that it would have been idle. So other work on the machine delays
no request. Requests enter the queue at their due times, prefills and decodes are computed, and a
request's TTFT ends with the step of its first token. The scheduler receives the HTTP process's messages:
a chat's category and turn, and the time once a second. Loads are shares of the arms' mean throughput
when half of the warm-up arrives at once. All arms take turns, slice by slice.
``waiting``: mean number of waiting requests over a slice's time. ``activated``: number of times that an
arm's session gate became active.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from paired import Result, compare, figures
from slices import balanced, due_times, rate_of, turn

from canopy_lab.trace import open_trace
from canopy_lab.trace.materialise import Materialiser, middle_tokens

TICK_S = 1.0
"""Seconds between two messages with the time."""
IDLE_S = 0.01
"""Sleep of a scheduler without work, s."""
WARM_REQUESTS, KV_TOKENS, COMMON = 60, 16_384, ("--chunked-prefill-size", "128")
SCALE_LENGTHS = Fraction(1, 64)
FILES = {"conversation": "conversation_first60", "synthetic": "synthetic_trace"}


class SkippingClock:
    """CPU seconds of this process plus skipped seconds."""

    def __init__(self) -> None:
        self.skipped = 0.0

    def __call__(self) -> float:
        return time.process_time() + self.skipped

    def wait_until(self, then: float) -> None:
        self.skipped += max(0.0, then - self())


class ArmScheduler:
    """One arm's scheduler."""

    def __init__(self, model: Path, arguments: list[str]) -> None:
        self.clock = SkippingClock()
        time.monotonic = self.clock  # before SGLang takes them over
        time.perf_counter = self.clock
        from support.scheduler import SteppedScheduler

        self._engine = SteppedScheduler(model, arguments, KV_TOKENS)
        self._scheduler = self._engine.scheduler

    def serve(self, part: Sequence[Any], due: Sequence[float]) -> dict[str, Any]:
        """Every request of ``part``, prompt, tokens to generate and stamp, when it is due."""
        from sglang_canopy.server.scheduler.admission import admission_of

        began, clock = self.clock(), self.clock
        todo = list(zip(due, part, strict=True))
        todo.reverse()
        open_: list[Any] = []
        rows: list[dict[str, Any]] = []
        last_tick_s, area = 0.0, 0.0
        while todo or open_:
            now = clock() - began
            if not open_ and todo:
                clock.wait_until(began + todo[-1][0])
                now = clock() - began
            while todo and todo[-1][0] <= now:
                then, (ids, new, stamp) = todo.pop()
                req = self._engine.feed(ids, new, time_s=began + then, stamp=stamp)
                open_.append((then, len(ids), req, [None]))
            if now - last_tick_s >= TICK_S:
                last_tick_s = now
                self._broadcast_time(began + now)
            waiting = len(self._scheduler.waiting_queue)
            self._step()
            area += waiting * (clock() - began - now)
            open_ = [one for one in open_ if not record_if_done(one, clock() - began, rows)]
        seconds = clock() - began
        admission = admission_of(self._scheduler)
        core = getattr(self._scheduler.tree_cache, "tree_core", None)
        return {
            "rows": rows,
            "seconds": seconds,
            "waiting": area / seconds,
            "gate": None if admission is None else stats(admission.gate),
            "whatif": None if admission is None else stats(core.live.meter),
        }

    def _step(self) -> None:
        """Make a step. Time passes if the gate holds all waiting requests."""
        self._engine.step()
        if self._scheduler.last_batch is None:
            self.clock.skipped += IDLE_S

    def _broadcast_time(self, now: float) -> None:
        from sglang_canopy.server.scheduler.admission import take_time

        take_time(self._scheduler, [repr(now)])


def stats(part: Any) -> Any:
    """Return the counts of a gate or a meter; ``None`` without one."""
    return None if part is None else part.stats()


def record_if_done(waiting: tuple[Any, ...], now: float, rows: list[dict[str, Any]]) -> bool:
    """Whether it is answered; then it is in ``rows``."""
    then, tokens, req, first = waiting
    if first[0] is None and len(req.output_ids):
        first[0] = now - then
    if not req.finished():
        return False
    rows.append(
        {
            "ttft_s": first[0],
            "done_s": now - then,
            "prompt_tokens": tokens,
            "cached_tokens": req.cached_tokens,
        }
    )
    return True


def work(pipe: Any, model: Path, arguments: list[str]) -> None:
    """A process of one arm."""
    import torch

    torch.set_num_threads(1)
    engine = ArmScheduler(model, arguments)
    pipe.send("ready")
    with torch.no_grad():
        while (asked := pipe.recv()) is not None:
            pipe.send(engine.serve(*asked))
    os._exit(0)  # SGLang's threads would keep the process


class ArmProcess:
    """The driver's end of one."""

    def __init__(self, text: str) -> None:
        self.name, _, arguments = text.partition("=")
        self.arguments = shlex.split(arguments)
        self.slices: list[list[dict[str, Any]]] = []
        self.seconds: list[float] = []
        self.waiting: list[float] = []
        self.activated: int | None = None
        self.whatif: dict[str, Any] | None = None

    def start(self, args: argparse.Namespace, work: Callable[..., None] = work) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        given = (theirs, args.model, [*COMMON, *self.arguments])
        self.process = context.Process(target=work, args=given, daemon=True)
        self.process.start()

    def ready(self) -> None:
        assert self._pipe.recv() == "ready"

    def serve(self, part: Any, due: Sequence[float]) -> dict[str, Any]:
        self._pipe.send((part, due))
        answer: dict[str, Any] = self._pipe.recv()
        return answer


def run(args: argparse.Namespace, arms: list[ArmProcess], result: Result) -> None:
    """Every load, slice by slice."""
    wanted = WARM_REQUESTS + args.slices * args.slice_requests
    trace = open_trace(args.data / f"mooncake/{FILES[args.trace]}.jsonl", "mooncake")
    requests = list(itertools.islice(trace, args.skip, args.skip + wanted))
    materialiser = Materialiser(requests, middle_tokens(1 << 15), SCALE_LENGTHS)
    for load in args.loads:
        if not result.is_measured(load):
            load_run = run_load(args, arms, materialiser, load)
            result.add(load_run)
            print(f"{load_run['load']:.0%} of saturation: {load_run['figures']}", flush=True)
            print(f"waiting on average: {load_run['waiting']}", flush=True)


def run_load(
    args: argparse.Namespace, arms: list[ArmProcess], tokens: Materialiser, load: float
) -> dict[str, Any]:
    """Return the result of one load."""

    def prompts(part: Sequence[Any]) -> list[Any]:
        return [
            (
                list(tokens.prompt(p)),
                max(1, p.output_tokens),
                {"category": "chat", "turn": p.request.turn},
            )
            for p in part
        ]

    warm, remaining = tokens.planned[:WARM_REQUESTS], tokens.planned[WARM_REQUESTS:]
    half = len(warm) // 2
    saturation_tokens_s: dict[str, float] = {}
    for arm in arms:
        arm.slices, arm.seconds, arm.waiting = [], [], []
        arm.serve(prompts(warm[:half]), [0.0] * half)
        seconds = arm.serve(prompts(warm[half:]), [0.0] * (len(warm) - half))["seconds"]
        saturation_tokens_s[arm.name] = sum(p.prompt_tokens for p in warm[half:]) / seconds
    parts = balanced(remaining, args.slices)
    rate = rate_of(parts, load, sum(saturation_tokens_s.values()) / len(saturation_tokens_s))
    for number, part in enumerate(parts):
        asked, due = prompts(part), due_times(part, rate, seed=number)
        for arm in turn(arms, number):
            result = arm.serve(asked, due)
            arm.slices.append(result["rows"])
            arm.seconds.append(result["seconds"])
            arm.waiting.append(result["waiting"])
            arm.whatif = result["whatif"]
            if result["gate"] is not None:
                arm.activated = result["gate"]["times_activated"]
        means = ", ".join(f"{a.name} {figures(a.slices[-1:])['mean']:.2f} s" for a in arms)
        print(f"{load:.0%}, slice {number + 1}: {means}", file=sys.stderr, flush=True)
    base = arms[0]
    return {
        "load": load,
        "requests_a_second": rate,
        "saturation_tokens_a_second": saturation_tokens_s,
        "slices": len(parts),
        "requests": sum(map(len, parts)),
        "seconds": {arm.name: sum(arm.seconds) for arm in arms},
        "waiting": {arm.name: round(sum(arm.waiting) / len(arm.waiting), 1) for arm in arms},
        "activated": {arm.name: arm.activated for arm in arms if arm.activated is not None},
        "whatif": {arm.name: arm.whatif for arm in arms if arm.whatif},
        "figures": {arm.name: figures(arm.slices) for arm in arms},
        "changes": {arm.name: compare(base.slices, arm.slices, 1) for arm in arms[1:]},
        "rows": {
            arm.name: [
                [[round(r["ttft_s"], 4), r["prompt_tokens"]] for r in part] for part in arm.slices
            ]
            for arm in arms
        },
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with mooncake/, ...")
    add("--out", type=Path, required=True, help="result, JSON")
    add("--model", type=Path, required=True, help="model directory")
    add("--arm", type=ArmProcess, action="append", required=True, dest="arms")
    add("--trace", choices=sorted(FILES), required=True)
    add("--loads", type=lambda t: [float(n) for n in t.split(",")], default="1.1")
    add("--slices", type=int, default=8)
    add("--slice-requests", type=int, default=250)
    add("--skip", type=int, default=0, help="requests of the trace to leave out")
    args = parser.parse_args()
    names = ("trace", "slices", "slice_requests", "skip")
    setup = {"arms": {arm.name: shlex.join(arm.arguments) for arm in args.arms}}
    setup |= {name: getattr(args, name) for name in names} | {"model": args.model.name}
    random.seed(1)
    for arm in args.arms:
        arm.start(args)
        arm.ready()
    run(args, args.arms, Result(args.out, setup))
    for arm in args.arms:
        arm.process.kill()


if __name__ == "__main__":
    main()
