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
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from paired import ResultFile, compare, figures
from slices import arm_order, cut_evenly, due_times, rate_of

from canopy_lab.trace import open_trace
from canopy_lab.trace.materialise import Materialiser, middle_token_ids

TIME_MESSAGE_S = 1.0
"""Seconds between two messages with the time."""
IDLE_STEP_S = 0.01
"""Time that a step without a batch takes."""
WARM_UP_REQUESTS, KV_TOKENS, COMMON_ARGUMENTS = 60, 16_384, ("--chunked-prefill-size", "128")
LENGTH_SCALE = Fraction(1, 64)
"""Factor of all lengths in tokens: the model is small."""
TRACE_FILES = {"conversation": "conversation_first60", "synthetic": "synthetic_trace"}


class SkippingClock:
    """CPU seconds of this process plus skipped seconds."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def __call__(self) -> float:
        return time.process_time() + self.skipped_s

    def wait_until(self, time_s: float) -> None:
        self.skipped_s += max(0.0, time_s - self())


class ArmScheduler:
    """One arm's scheduler, whose time is its own CPU time."""

    def __init__(self, model: Path, arguments: list[str]) -> None:
        self.clock = SkippingClock()
        time.monotonic = self.clock  # before SGLang takes them over
        time.perf_counter = self.clock
        from support.scheduler import SteppedScheduler

        self._engine = SteppedScheduler(model, arguments, KV_TOKENS)
        self._scheduler = self._engine.scheduler

    def serve(self, slice_requests: Sequence[Any], due_s: Sequence[float]) -> dict[str, Any]:
        """Serve a slice: prompts, tokens to generate and stamps, each at its due time; return its figures."""
        from sglang_canopy.server.scheduler.admission import admission_of

        start_s, clock = self.clock(), self.clock
        pending = list(zip(due_s, slice_requests, strict=True))
        pending.reverse()
        open_requests: list[OpenRequest] = []
        rows: list[dict[str, Any]] = []
        last_message_s, waiting_request_s = 0.0, 0.0
        while pending or open_requests:
            now_s = clock() - start_s
            if not open_requests and pending:
                clock.wait_until(start_s + pending[-1][0])
                now_s = clock() - start_s
            while pending and pending[-1][0] <= now_s:
                request_due_s, (ids, new_tokens, stamp) = pending.pop()
                time_s = start_s + request_due_s
                req = self._engine.feed(ids, new_tokens, time_s=time_s, stamp=stamp)
                open_requests.append(OpenRequest(request_due_s, len(ids), req))
            if now_s - last_message_s >= TIME_MESSAGE_S:
                last_message_s = now_s
                self._broadcast_time(start_s + now_s)
            waiting = len(self._scheduler.waiting_queue)
            self._step()
            waiting_request_s += waiting * (clock() - start_s - now_s)
            step_end_s = clock() - start_s
            open_requests = [r for r in open_requests if not record_if_done(r, step_end_s, rows)]
        seconds = clock() - start_s
        admission = admission_of(self._scheduler)
        core = getattr(self._scheduler.tree_cache, "tree_core", None)
        return {
            "rows": rows,
            "seconds": seconds,
            "waiting": waiting_request_s / seconds,
            "gate": None if admission is None else stats_of(admission.gate),
            "whatif": None if admission is None else stats_of(core.live.meter),
        }

    def _step(self) -> None:
        """Make a step. Time passes if the gate holds all waiting requests."""
        self._engine.step()
        if self._scheduler.last_batch is None:
            self.clock.skipped_s += IDLE_STEP_S

    def _broadcast_time(self, time_s: float) -> None:
        from sglang_canopy.server.scheduler.admission import take_times

        take_times(self._scheduler, [repr(time_s)])


def stats_of(part: Any) -> Any:
    """Return the counts of a gate or a meter; ``None`` without one."""
    return None if part is None else part.stats()


@dataclass(slots=True)
class OpenRequest:
    """A request without a whole answer. Times are in seconds from the slice's start."""

    due_s: float
    prompt_tokens: int
    req: Any
    ttft_s: float | None = None


def record_if_done(request: OpenRequest, now_s: float, rows: list[dict[str, Any]]) -> bool:
    """Return whether the request is answered; if so, it is added to ``rows``."""
    if request.ttft_s is None and len(request.req.output_ids):
        request.ttft_s = now_s - request.due_s
    if not request.req.finished():
        return False
    rows.append(
        {
            "ttft_s": request.ttft_s,
            "done_s": now_s - request.due_s,
            "prompt_tokens": request.prompt_tokens,
            "cached_tokens": request.req.cached_tokens,
        }
    )
    return True


def run_arm_process(pipe: Any, model: Path, arguments: list[str]) -> None:
    """Run an arm's scheduler in this process; serve each slice that the pipe receives."""
    import torch

    torch.set_num_threads(1)
    engine = ArmScheduler(model, arguments)
    pipe.send("ready")
    with torch.no_grad():
        while (slice_and_times := pipe.recv()) is not None:
            pipe.send(engine.serve(*slice_and_times))
    os._exit(0)  # SGLang's threads would keep the process


class ArmProcess:
    """An arm's process, seen from the driver, and its results."""

    def __init__(self, option: str) -> None:
        self.name, _, arguments = option.partition("=")
        self.arguments = shlex.split(arguments)
        self.slice_rows: list[list[dict[str, Any]]] = []
        self.slice_seconds: list[float] = []
        self.mean_waiting: list[float] = []
        self.gate_activations: int | None = None
        self.whatif: dict[str, Any] | None = None

    def start(self, args: argparse.Namespace, run: Callable[..., None] = run_arm_process) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_pipe = context.Pipe()
        process_arguments = (child_pipe, args.model, [*COMMON_ARGUMENTS, *self.arguments])
        self.process = context.Process(target=run, args=process_arguments, daemon=True)
        self.process.start()

    def wait_until_ready(self) -> None:
        assert self._pipe.recv() == "ready"

    def serve(self, part: Any, due_s: Sequence[float]) -> dict[str, Any]:
        self._pipe.send((part, due_s))
        answer: dict[str, Any] = self._pipe.recv()
        return answer


def run_loads(args: argparse.Namespace, arms: list[ArmProcess], result_file: ResultFile) -> None:
    """Measure every load that the result file does not have."""
    request_count = WARM_UP_REQUESTS + args.slices * args.slice_requests
    trace = open_trace(args.data / f"mooncake/{TRACE_FILES[args.trace]}.jsonl", "mooncake")
    requests = list(itertools.islice(trace, args.skip, args.skip + request_count))
    materialiser = Materialiser(requests, middle_token_ids(1 << 15), LENGTH_SCALE)
    for load in args.loads:
        if not result_file.is_measured(load):
            load_run = run_load(args, arms, materialiser, load)
            result_file.add(load_run)
            print(f"{load_run['load']:.0%} of saturation: {load_run['figures']}", flush=True)
            print(f"waiting on average: {load_run['waiting']}", flush=True)


def run_load(
    args: argparse.Namespace, arms: list[ArmProcess], tokens: Materialiser, load: float
) -> dict[str, Any]:
    """Return the result of one load."""

    def prompts(part: Sequence[Any]) -> list[Any]:
        stamps = [{"category": "chat", "turn": p.request.turn} for p in part]
        lengths = [max(1, p.output_tokens) for p in part]
        return list(zip([list(tokens.prompt(p)) for p in part], lengths, stamps))

    warm_up, remaining = tokens.planned[:WARM_UP_REQUESTS], tokens.planned[WARM_UP_REQUESTS:]
    half = len(warm_up) // 2
    saturation_tokens_s: dict[str, float] = {}
    for arm in arms:
        arm.slice_rows, arm.slice_seconds, arm.mean_waiting = [], [], []
        arm.serve(prompts(warm_up[:half]), [0.0] * half)
        seconds = arm.serve(prompts(warm_up[half:]), [0.0] * (len(warm_up) - half))["seconds"]
        saturation_tokens_s[arm.name] = sum(p.prompt_tokens for p in warm_up[half:]) / seconds
    parts = cut_evenly(remaining, args.slices)
    rate = rate_of(parts, load, sum(saturation_tokens_s.values()) / len(saturation_tokens_s))
    for number, part in enumerate(parts):
        slice_prompts, due_s = prompts(part), due_times(part, rate, seed=number)
        for arm in arm_order(arms, number):
            served = arm.serve(slice_prompts, due_s)
            arm.slice_rows.append(served["rows"])
            arm.slice_seconds.append(served["seconds"])
            arm.mean_waiting.append(served["waiting"])
            arm.whatif = served["whatif"]
            if served["gate"] is not None:
                arm.gate_activations = served["gate"]["times_activated"]
        means = ", ".join(f"{a.name} {figures(a.slice_rows[-1:])['mean']:.2f} s" for a in arms)
        print(f"{load:.0%}, slice {number + 1}: {means}", file=sys.stderr, flush=True)
    base_arm = arms[0]
    return {
        "load": load,
        "requests_a_second": rate,
        "saturation_tokens_a_second": saturation_tokens_s,
        "slices": len(parts),
        "requests": sum(map(len, parts)),
        "seconds": {arm.name: sum(arm.slice_seconds) for arm in arms},
        "waiting": {a.name: round(sum(a.mean_waiting) / len(a.mean_waiting), 1) for a in arms},
        "activated": {a.name: a.gate_activations for a in arms if a.gate_activations is not None},
        "whatif": {arm.name: arm.whatif for arm in arms if arm.whatif},
        "figures": {arm.name: figures(arm.slice_rows) for arm in arms},
        "changes": {arm.name: compare(base_arm.slice_rows, arm.slice_rows, 1) for arm in arms[1:]},
        "rows": {
            a.name: [[[round(r["ttft_s"], 4), r["prompt_tokens"]] for r in s] for s in a.slice_rows]
            for a in arms
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
    add("--trace", choices=sorted(TRACE_FILES), required=True)
    add("--loads", type=lambda t: [float(n) for n in t.split(",")], default="1.1")
    add("--slices", type=int, default=8)
    add("--slice-requests", type=int, default=250)
    add("--skip", type=int, default=0, help="requests of the trace to leave out")
    args = parser.parse_args()
    setting_names = ("trace", "slices", "slice_requests", "skip")
    setup = {"arms": {arm.name: shlex.join(arm.arguments) for arm in args.arms}}
    setup |= {name: getattr(args, name) for name in setting_names} | {"model": args.model.name}
    random.seed(1)
    for arm in args.arms:
        arm.start(args)
        arm.wait_until_ready()
    run_loads(args, args.arms, ResultFile(args.out, setup))
    for arm in args.arms:
        arm.process.kill()


if __name__ == "__main__":
    main()
