"""Prefill seconds under LRU and ``wa``.

    python benchmark/eviction/prefill_seconds.py --data DIR --out benchmark/eviction/results/prefill_seconds.json

``judge`` is an overlay of 60 sessions of users 4 and 8 of agents_global.tar.xz, with blocks merged to
512 tokens; ``conversation`` is half of the Mooncake trace. The seconds are those of each prompt's
uncached tokens alone under a profile.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in ("", "traces")]
from by_user import write
from overlays import overlay

import result_file
from canopy_lab.advise.sample import merged
from canopy_lab.sim.driver import distinct_blocks, simulate
from canopy_lab.sim.sweep import PrefillSeconds
from canopy_lab.sim.system import load_profile
from canopy_lab.trace.open import open_trace
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.registry import make_policy

JUDGES = ("user4", "user8")
SEEDS = {"judge": range(4), "conversation": range(2)}
SHARES = (0.02, 0.05, 0.1)


def sessions(data: Path, count: int, seed: int) -> Iterator[TraceRequest]:
    """An overlay of sessions of users 4 and 8, started within two hours."""
    with tempfile.TemporaryDirectory() as folder:
        write(data / "agents_global.tar.xz", JUDGES, Path(folder))
        yield from overlay(Path(folder), count, 7200.0, seed)


def trace_of(data: Path, split: str, seed: int) -> list[TraceRequest]:
    if split == "judge":
        return [merged(r, 8) for r in sessions(data, 60, seed)]
    rows = list(open_trace(data / "mooncake" / "conversation_first60.jsonl", "mooncake"))
    half = len(rows) // 2
    return rows[half:] if seed else rows[:half]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the public traces")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for split, seed in ((split, seed) for split, seeds in SEEDS.items() for seed in seeds):
        trace = trace_of(args.data, split, seed)
        seconds, distinct = (
            PrefillSeconds(load_profile("llama-3.1-8b-h100"), trace),
            distinct_blocks(trace),
        )
        for share, arm in itertools.product(SHARES, ("lru", "wa")):
            result = simulate(trace, make_policy(arm), round(share * distinct))
            row = {"split": split, "seed": seed, "at": share, "arm": arm, "requests": len(trace)}
            row["hits"] = float(f"{100 * result.token_hit_ratio:.6g}")
            row["seconds"] = float(f"{seconds.of(result.uncached_tokens):.6g}")
            rows.append(row)
            print(row, flush=True)
    result_file.write(args.out, rows)


if __name__ == "__main__":
    main()
