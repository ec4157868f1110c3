"""Value of each signal of a request for `wa`, trace by trace, with its placebo.

    python benchmark/eviction/signals.py --data DIR --out benchmark/eviction/results/signals.json

Each signal of a category is removed in turn, then replaced by the value of another request,
drawn from the last 10,000 (the placebo). DIR holds `mooncake/` and `agentic_coding/`; `trace-a` is the
synthetic trace of docs/research/synthetic-traces.md, six hours of it. Writes one row a run; with
`--only TRACE` the rows of the others stay.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from canopy_lab.sim.driver import distinct_blocks, simulate
from canopy_lab.trace.open import open_trace
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.reuse import learner
from sglang_canopy.reuse.categories import features

sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in ("traces", "papers")]
from overlays import overlay
from wa.sources import trace_a

SIGNALS = {"stop": 1, "turn": 2, "output": 3, "own gaps": 4, "added": 5}
"""Name -> position among the arguments of ``features``."""
AFTER_TOOLS = ("stop", "own gaps")
"""Signals that only a trace with tool calls has."""
CAPACITIES = {
    "conversation": (0.02, 0.05, 0.1, 0.2),
    "synthetic": (0.02, 0.05, 0.1, 0.2),
    "agentic": (0.02, 0.05),
    "trace-a": (0.02, 0.05),
}
SEEDS = {"agentic": (1, 2), "trace-a": (1, 2)}
DRAWN_FROM = 10_000

Features = Callable[..., tuple[str, ...]]


def read(data: Path, name: str, seed: int) -> list[TraceRequest]:
    mooncake = data / "mooncake"
    if name == "conversation":
        return list(open_trace(mooncake / "conversation_first60.jsonl", "mooncake"))
    if name == "synthetic":
        return list(open_trace(mooncake / "synthetic_trace.jsonl", "mooncake"))
    if name == "trace-a":
        return trace_a(seconds=6 * 3600.0, seed=seed)
    archive = data / "agentic_coding" / "traces_500.tar.xz"
    return list(overlay(archive, 200, 7200.0, seed))


def without(signal: str) -> Features:
    """Return a feature function that ignores ``signal``."""
    place = SIGNALS[signal]

    def made(*said: Any) -> tuple[str, ...]:
        if signal in ("turn", "output"):
            return tuple(name for name in features(*said) if not name.startswith(signal[:3]))
        return features(*said[:place], None, *said[place + 1 :])

    return made


def of_another(signal: str) -> Features:
    """Labels with the ``signal`` of a request drawn from the last 10,000."""
    place, draw, seen = SIGNALS[signal], random.Random(1), []

    def made(*said: Any) -> tuple[str, ...]:
        seen.append(said[place])
        return features(*said[:place], draw.choice(seen[-DRAWN_FROM:]), *said[place + 1 :])

    return made


def rows(name: str, seed: int, trace: list[TraceRequest]) -> Iterator[dict[str, Any]]:
    distinct = distinct_blocks(trace)
    tools = any(request.stop == "tool" for request in trace)
    arms: dict[tuple[str, str], Callable[[], Features]] = {("wa", ""): lambda: features}
    for signal in SIGNALS:
        if tools or signal not in AFTER_TOOLS:
            arms[signal, "without"] = lambda signal=signal: without(signal)
            arms[signal, "placebo"] = lambda signal=signal: of_another(signal)
    for (signal, kind), make in arms.items():
        for capacity in CAPACITIES[name]:
            with mock.patch.object(learner, "features", make()):
                result = simulate(trace, make_policy("wa"), int(distinct * capacity))
            yield {
                "trace": name,
                "seed": seed,
                "signal": signal,
                "kind": kind,
                "capacity_fraction": capacity,
                "block_hit_ratio": round(result.block_hit_ratio, 5),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the public traces")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=list(CAPACITIES))
    args = parser.parse_args()
    names = [args.only] if args.only else list(CAPACITIES)
    known = json.loads(args.out.read_text()) if args.out.exists() else []
    made = [row for row in known if row["trace"] not in names]
    for name in names:
        for seed in SEEDS.get(name, (0,)):
            for row in rows(name, seed, read(args.data, name, seed)):
                made.append(row)
                print(row, flush=True)
    args.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
