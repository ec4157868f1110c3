"""Stated confidence of plans, and the share of fresh logs that meet their limits.

    python benchmark/plan/confidence.py chats 120 --logs 32

Draws logs of one population and simulates each at several sizes of host memory. For each of twelve
limits (quantiles of what the sizes reach) and each log, takes the smallest size that meets the limit
with a confidence of .9, else the surest that meets it, as a plan does; the other logs are its fresh
traffic. ``uncertainty.SLOPE`` and ``SHIFT`` were fitted on tuned ``ROLES``. Replaces
the population's rows in results/confidence.json.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from canopy_lab.plan.evaluate import Evaluator
from canopy_lab.plan.planner import footprint
from canopy_lab.plan.prices import load_prices
from canopy_lab.plan.space import Configuration
from canopy_lab.plan.system import Engine
from canopy_lab.plan.uncertainty import SHIFT, SLOPE, STATISTICS, Resampling
from canopy_lab.plan.worker import PlanInputs
from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.system.engine_profile import load_profile
from canopy_lab.trace.record import TraceRequest

RESULTS = Path(__file__).parent / "results" / "confidence.json"
BLOCK, PER_S = 64, 120 / 1800.0
"""Tokens of a block; conversations that start per second."""
SHARES = (0.08, 0.15, 0.25, 0.4, 0.7)
"""Host memory as a share of the first log's distinct KV; no host memory is tried too."""
DRAWS, LIMITS, SURE = 200, 12, 0.9
ROLES = {"chats": "tuned", "bursts": "tuned", "days": "not covered"}
"""All other populations judge."""
METRICS = ("p99_ttft", "p90_ttft", "mean_ttft")


class Draw:
    """Draws a log."""

    def __init__(self, seed: int) -> None:
        self.random, self.made, self._next = random.Random(seed), [], 10**6  # type: ignore[var-annotated]

    def chat(self, number: int, begin: float, path: list[int], more: Callable[[], float],
             pause: Callable[[], float], goes_on: float, longest: int, output: int) -> None:  # fmt: skip
        """Add the turns of a conversation of geometric length. ``more``: blocks of a turn."""
        at, turn = begin, 1
        while True:
            blocks = max(1, int(more()))
            path = [*path, *range(self._next, self._next + blocks)][:longest]
            self._next += blocks
            self.made.append((at, number, turn, tuple(path), output))
            if self.random.random() > goes_on:
                return
            at += pause()
            turn += 1

    def trace(self) -> CompactTrace:
        self.made.sort(key=lambda request: request[0])
        start = self.made[0][0]
        return CompactTrace(
            TraceRequest(
                at - start, len(path) * BLOCK, output, path, BLOCK,
                turn=turn, conversation=str(number), line=line,
            )
            for line, (at, number, turn, path, output) in enumerate(self.made)
        )  # fmt: skip


def chats(seed: int, count: int) -> CompactTrace:
    """Independent starts, lognormal turns."""
    log, begin = Draw(seed), 0.0
    draw = log.random
    for number in range(count):
        begin += draw.expovariate(PER_S)
        head = list(range(number * 8, number * 8 + 8))
        turn, pause = (lambda: draw.lognormvariate(3.2, 0.9)), (lambda: draw.lognormvariate(4, 1))
        log.chat(number, begin, head, turn, pause, 0.6, 800, 60)
    return log.trace()


def bursts(seed: int, count: int) -> CompactTrace:
    """Starts in bursts, Pareto turns."""
    log, begin, level = Draw(seed), 0.0, 1.0
    draw = log.random
    for number in range(count):
        if draw.random() < 0.05:
            level = draw.gammavariate(0.6, 1 / 0.6) + 0.1
        begin += draw.expovariate(PER_S * level)
        turn, pause = (lambda: min(600, 12 * draw.paretovariate(1.3))), (lambda: draw.lognormvariate(3.5, 1.2))  # fmt: skip
        log.chat(number, begin, [], turn, pause, 0.55, 800, 60)
    return log.trace()


def agents(seed: int, count: int) -> CompactTrace:
    """Five applications with heads of 4,000 to 16,000 tokens, many quick turns."""
    log, begin = Draw(seed), 0.0
    draw = log.random
    heads = [list(range(1000 * at, 1000 * at + size)) for at, size in enumerate((64, 96, 128, 192, 256))]  # fmt: skip
    for number in range(count):
        begin += draw.expovariate(PER_S / 3)
        head = heads[min(int(draw.expovariate(0.7)), 4)]
        turn, pause = (lambda: draw.lognormvariate(2, 1.1)), (lambda: draw.lognormvariate(2, 0.8))
        log.chat(number, begin, head, turn, pause, 0.88, 900, 120)
    return log.trace()


def documents(seed: int, count: int) -> CompactTrace:
    """Questions on 400 documents of Zipf popularity, few turns."""
    log, begin, lengths = Draw(seed), 0.0, random.Random(99)
    draw = log.random
    texts, at = [], 2 * 10**7
    for _ in range(400):
        size = min(900, max(16, int(lengths.lognormvariate(4.6, 0.8))))
        texts.append(range(at, at + size))
        at += size
    popular = [1 / (rank + 1) ** 0.9 for rank in range(400)]
    for number in range(count):
        begin += draw.expovariate(PER_S / 2)
        text = list(draw.choices(texts, popular)[0])
        turn, pause = (lambda: draw.lognormvariate(1, 0.8)), (lambda: draw.lognormvariate(3.8, 1))
        log.chat(number, begin, text, turn, pause, 0.4, 920, 100)
    return log.trace()


def days(seed: int, count: int) -> CompactTrace:
    """Ten days; the number of chats and their length are each day's own."""
    log = Draw(seed)
    draw = log.random
    for day in range(10):
        chats_of_day = max(4, int(count // 10 * draw.lognormvariate(-0.08, 0.4)))
        size, begin = draw.lognormvariate(0, 0.35), day * 86400.0 + 30000
        for number in range(chats_of_day):
            begin += draw.expovariate(PER_S)
            turn, pause = (lambda size=size: size * draw.lognormvariate(3.2, 0.9)), (lambda: draw.lognormvariate(4, 1))  # fmt: skip
            log.chat(day * 100_000 + number, begin, [], turn, pause, 0.6, 800, 60)
    return log.trace()


POPULATIONS = {
    "days": days,
    "chats": chats,
    "bursts": bursts,
    "agents": agents,
    "documents": documents,
}


def simulated(trace: CompactTrace, engine: Engine, dram_gib: list[float]) -> list[list[np.ndarray]]:
    """Return, per size and metric, the logarithms of the metric and of its draws."""
    found = []
    with Evaluator(PlanInputs(trace, engine, load_prices("aws-us-east-1")), jobs=1) as evaluate:
        for size in dram_gib:
            result = evaluate.result(Configuration(dram_gib=size, page_size=BLOCK).normal())
            resampled = Resampling(result.due_s, evaluate.conversations())
            draw = np.random.default_rng(0)
            every = np.arange(result.requests)
            parts = [every, *(resampled.draw(draw) for _ in range(DRAWS))]
            statistics = [STATISTICS[f"{metric}_s"] for metric in METRICS]
            found.append([np.log([of(result, at) for at in parts]) for of in statistics])
    return found


def share_of_draws(limit: float, value: np.ndarray) -> float:
    return float(np.mean(value[1:] < limit))


def probit(limit: float, value: np.ndarray) -> float:
    distance = (limit - value[0]) / max(float(np.std(value[1:])), 1e-9)
    return NormalDist().cdf(SLOPE * min(max(distance, -16.0), 16.0) + SHIFT)


METHODS = {"share of draws": share_of_draws, "probit of the distance": probit}


def plans(logs: list[list[np.ndarray]], stated: Callable[[float, np.ndarray], float]) -> np.ndarray:
    """Return a row per plan: stated confidence, share of the other logs that met the limit.

    ``logs``: logarithms by log and size.
    """
    reached, made = np.array([[size[0] for size in log] for log in logs]), []
    for limit in np.quantile(reached, np.linspace(0.1, 0.95, LIMITS)):
        for at, log in enumerate(logs):
            tried = [(n, stated(limit, size)) for n, size in enumerate(log) if size[0] < limit]
            if tried:
                surest = max(tried, key=lambda pair: pair[1])
                size, said = next((one for one in tried if one[1] >= SURE), surest)
                made.append((said, np.mean(np.delete(reached[:, size], at) < limit)))
    return np.array(made)


def rows(population: str, conversations: int, count: int) -> list[dict[str, Any]]:
    """Return a row per method and metric."""
    engine = Engine(profile=load_profile("llama-3.1-8b-h100"), device_tokens=60_000)
    draw = POPULATIONS[population]
    whole = footprint(draw(0, conversations), engine)
    sizes = [0.0, *(round(whole * share, 1) for share in SHARES)]
    logs = [simulated(draw(seed, conversations), engine, sizes) for seed in range(count)]
    found = []
    for method, stated in METHODS.items():
        for number, metric in enumerate(METRICS):
            made = plans([[size[number] for size in log] for log in logs], stated)
            sure = made[made[:, 0] >= SURE]
            found.append({
                "population": population, "conversations": conversations,
                "role": ROLES.get(population, "judged"),
                "metric": metric, "method": method, "logs": count, "plans": len(made),
                "stated": float(made[:, 0].mean()), "held": float(made[:, 1].mean()),
                "sure": len(sure),
                "sure_stated": float(sure[:, 0].mean()) if len(sure) else None,
                "sure_held": float(sure[:, 1].mean()) if len(sure) else None,
            })  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("population", choices=list(POPULATIONS))
    parser.add_argument("conversations", type=int)
    parser.add_argument("--logs", type=int, default=40)
    args = parser.parse_args()
    wanted = (args.population, args.conversations)
    kept = [r for r in json.loads(RESULTS.read_text()) if (r["population"], r["conversations"]) != wanted]  # fmt: skip
    RESULTS.write_text(json.dumps([*kept, *rows(*wanted, args.logs)], indent=1) + "\n")


if __name__ == "__main__":
    main()
