"""Whether what a turn added to its prompt is worth a refinement of `wa`'s categories.

    python benchmark/eviction/added.py --data DIR --out benchmark/eviction/results/added.json

`wa` as it is, `wa` with `{"categories": "added"}`, and the latter with another request's added tokens
(the placebo), on four traces. The edges of the buckets were chosen on the first three. `--only NAME` runs one of them; rows of the others stay.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
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

ARMS = ("wa", "added", "placebo")
CAPACITIES = {
    "conversation": (0.02, 0.05, 0.1, 0.2),
    "synthetic": (0.02, 0.05, 0.1, 0.2),
    "agentic": (0.02, 0.05),
    "trace-a": (0.02, 0.05),
}
SEEDS = {"agentic": (1,), "trace-a": (1, 2)}


def read(data: Path, name: str, seed: int) -> list[TraceRequest]:
    mooncake = data / "mooncake"
    if name == "conversation":
        return list(open_trace(mooncake / "conversation_first60.jsonl", "mooncake"))
    if name == "synthetic":
        return list(open_trace(mooncake / "synthetic_trace.jsonl", "mooncake"))
    if name == "trace-a":
        return trace_a(seconds=6 * 3600.0, seed=seed)
    archive = data / "agentic_coding" / "traces_500.tar.xz"
    return list(overlay(archive, 200, 7200.0, seed, own_prefixes=True))


class OfAnother:
    """Labels with the added tokens of a request drawn from the last 10,000."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._seen: list[int] = []

    def __call__(self, *said: Any) -> tuple[str, ...]:
        *rest, added = said
        self._seen.append(added)
        return features(*rest, self._draw.choice(self._seen[-10_000:]))


def rows(name: str, seed: int, trace: list[TraceRequest]) -> Iterator[dict[str, Any]]:
    distinct = distinct_blocks(trace)
    for arm in ARMS:
        options = {} if arm == "wa" else {"categories": "added"}
        labels = OfAnother(1) if arm == "placebo" else features
        for capacity in CAPACITIES[name]:
            with mock.patch.object(learner, "features", labels):
                result = simulate(trace, make_policy("wa", options), int(distinct * capacity))
            yield {
                "trace": name,
                "seed": seed,
                "arm": arm,
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
