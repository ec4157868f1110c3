"""Simulated: early refusal (`--canopy-ttft-slo-s`) changes in goodput, and its calibration.

    python benchmark/latency/refusal.py --data DIR --out FILE --set tune
    python benchmark/latency/refusal.py --data DIR --out FILE --set judge
    python benchmark/latency/refusal.py --data DIR --out FILE --set other

Chat, open loop, at shares of saturation: what SGLang's defaults serve if all of a trace arrives at
once. Goodput is the share of the offered requests, the first fifth left out, that are answered with
a TTFT within the limit. Refused requests are not sent again. Arms: no refusal; SGLang's
``--max-queued-requests``; early refusal; and its placebo, which refuses as many at random. All
have ``wa`` and the bounded-shortest order, but those named ``SGLang``, which have SGLang's ``lru``.
As on a server, factors are adopted every 32 prefill batches. A run that the file has is not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from canopy_lab.sim.system import SystemConfig, load_profile
from canopy_lab.sim.system import run as system_run
from canopy_lab.sim.system.arrivals import OpenLoop
from canopy_lab.sim.system.instance import Instance
from canopy_lab.sim.system.job import SimulatedRequest
from canopy_lab.sim.system.queue_order import BoundedShortestFirst
from canopy_lab.sim.system.run import simulate_system
from canopy_lab.sim.system.workload import Workload
from canopy_lab.trace import open_trace
from sglang_canopy.schedule.early_refusal import Decision, EarlyRefusal
from sglang_canopy.schedule.fair_shares import PUBLIC
from sglang_canopy.schedule.prefill_cost import REFIT_BATCHES

SETS = {
    "tune": ("conversation", 0, 1200, "qwen2.5-7b-h100", 1_000_000),
    "judge": ("synthetic", 1500, 1200, "qwen2.5-7b-h100", 1_000_000),
    "other": ("conversation", 3000, 1200, "llama-3.1-8b-h100", 400_000),
}
"""Name -> trace, requests left out, requests, profile and tokens of device memory."""
FILES = {"conversation": "conversation_first60", "synthetic": "synthetic_trace"}
LOADS = (0.95, 1.1, 1.3)
WARM_UP = 0.2
TRIED = (4, 8, 16, 32)
"""``--max-queued-requests`` on the first set."""
CHOSEN = {"max": 16, "SGLang, max": 32}
"""The best of them there, by the sum of goodput over the loads; the only ones on the other sets."""
SGLANG = {"whole_nodes": True, "waiting_prefixes": "touched"}
OURS = {"device_policy": "wa", "schedule_policy": "bounded-shortest"}
SHORTEST = {**SGLANG, "schedule_policy": "shortest-prefill-first"}

Rule = Callable[[Instance, SimulatedRequest, float], bool]


def none(_instance: Instance, _job: SimulatedRequest, _now: float) -> bool:
    return False


def most(requests: int) -> Rule:
    """SGLang's limit on waiting requests."""
    return lambda instance, _job, _now: len(instance.queue.jobs) + 1 > requests


def at_random(share: float) -> Rule:
    draw = random.Random(1)
    return lambda *_: draw.random() < share


class Early:
    """Early refusal in a simulated instance."""

    def __init__(self, limit_s: float) -> None:
        self.refusal = EarlyRefusal(limit_s)
        self.decided: dict[int, Decision] = {}
        self.batches = 0

    def __call__(self, instance: Instance, job: SimulatedRequest, now: float) -> bool:
        queue, order = instance.queue, instance.queue._order
        assert isinstance(order, BoundedShortestFirst)
        queue.now, order._view = now, queue
        arranged = order._arranged
        cost = order.seconds(order.prefill(job, True))
        entering = [
            order.seconds(order.prefill(one, True))
            for one in queue.jobs
            if id(one) not in arranged.waiting
        ]
        work = arranged.order.work_before_new(cost, entering={(0, PUBLIC): sorted(entering)})
        made = self.refusal.decide(work, len(queue.jobs))
        if not made.refused:
            self.refusal.bound.load.arrived(cost, now)
            self.decided[job.index] = made
        return made.refused

    def prefilled(self, first: list[SimulatedRequest], now: float) -> None:
        bound = self.refusal.bound
        for job in first:
            made = self.decided.pop(job.index)
            bound.observed(made.predicted_s, made.bound_s, now - job.arrival)
        self.batches += 1
        if self.batches % REFIT_BATCHES == 0:
            bound.adopt(bound.measured())


def instance_of(rule: Rule, refused: set[int]) -> type[Instance]:
    """An instance whose arriving requests ``rule`` may refuse."""

    class Refusing(Instance):
        def arrive(self, job: SimulatedRequest, now: float) -> None:
            if rule(self, job, now):
                refused.add(job.index)
            else:
                super().arrive(job, now)

        def _end_prefill(self, now: float) -> None:
            first = [
                job
                for job, new in self.prefilling.batch
                if math.isnan(job.first_token) and job.done + new >= job.target
            ]
            super()._end_prefill(now)
            if isinstance(rule, Early):
                rule.prefilled(first, now)

    return Refusing


def run(
    workload: Workload,
    about: Any,
    settings: dict[str, Any],
    stretch: float,
    rule: Rule,
    limit: float,
) -> dict[str, Any]:
    """One simulation's figures, shares of the offered requests."""
    _, _, _, profile, device_tokens = about
    refused: set[int] = set()
    system_run.Instance = instance_of(rule, refused)  # type: ignore[misc]
    config = SystemConfig(device_tokens=device_tokens, fixed_outputs=True, **settings)
    result = simulate_system(
        workload, config, load_profile(profile), arrivals=OpenLoop(workload, stretch)
    )
    count = len(workload)
    first = int(WARM_UP * count)
    ttft = result.ttft_s[first:]
    kept = np.array([number not in refused for number in range(first, count)])
    good = kept & (ttft <= limit)
    tokens = np.array([workload.request(number)[2] for number in range(first, count)])
    long = tokens >= np.percentile(tokens, 90)
    made = {
        "makespan_s": result.makespan_s,
        "goodput": good.mean(),
        "goodput_tokens": tokens[good].sum() / tokens.sum(),
        "goodput_longest_tenth": good[long].mean(),
        "refused": 1.0 - kept.mean(),
        "late": (kept & ~good).mean(),
        "mean_ttft_s": ttft[kept].mean(),
    }
    if isinstance(rule, Early):
        bound = rule.refusal.bound
        made |= {"bounds": bound.requests, "covered": bound.covered / max(bound.requests, 1)}
    return {key: float(f"{value:.4g}") for key, value in made.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, required=True)
    add("--out", type=Path, required=True)
    add("--set", choices=SETS, required=True)
    add("--limits", type=lambda text: [float(n) for n in text.split(",")], default=[5.0])
    args = parser.parse_args()
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    rows = known.setdefault(args.set, {})
    trace, skip, requests, *_ = about = SETS[args.set]
    path = args.data / f"mooncake/{FILES[trace]}.jsonl"
    workload = Workload(list(itertools.islice(open_trace(path, "mooncake"), skip, skip + requests)))

    def row(name: str, settings: dict[str, Any], stretch: float, rule: Rule, limit: float) -> Any:
        if name not in rows:
            rows[name] = run(workload, about, settings, stretch, rule, limit)
            args.out.write_text(json.dumps(known, indent=1) + "\n")
            print(args.set, name, rows[name], flush=True)
        return rows[name]

    span = workload.times[-1] - workload.times[0]
    stretch = row("saturation", SGLANG, 1e-6, none, 1.0)["makespan_s"] / span
    for limit, load in itertools.product(args.limits, LOADS):
        at, slow = f"{limit:g} s, {load:.0%}: ", stretch / load
        made = row(at + "early refusal", OURS, slow, Early(limit), limit)
        row(at + "at random", OURS, slow, at_random(made["refused"]), limit)
        row(at + "none", OURS, slow, none, limit)
        for name, chosen in CHOSEN.items():
            settings = OURS if name == "max" else SHORTEST
            for queued in TRIED if args.set == "tune" else (chosen,):
                row(f"{at}{name} {queued}", settings, slow, most(queued), limit)
        row(at + "SGLang, none", SGLANG, slow, none, limit)


if __name__ == "__main__":
    main()
