"""Gains of `wa` and `etlru` over LRU and the simple baselines, with placebos.

    python benchmark/eviction/claims.py --data DIR --out OUT

DIR holds `mooncake/` and `agentic_coding/`. Writes OUT/claims.json (one row a run) and
OUT/claims.png. One process, about a quarter of an hour; with
`--rows OUT/claims.json` it only makes the figure again, and with `--variants NAME` beside it runs
these policies anew and replaces their rows, those of the tail too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from tqdm import tqdm

from canopy_lab.sim.driver import distinct_blocks, randomise_categories, simulate
from canopy_lab.sim.hindsight import make_hindsight
from canopy_lab.sim.hindsight.future import Future
from canopy_lab.trace.open import open_trace
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.registry import make_policy

sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in ("", "traces")]
from overlays import overlay

import result_file

SEEDS = (1, 2, 3)
CAPACITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
SIMPLE = ("lru", "fifo", "lfu", "slru", "s3fifo", "gdfs")
TAIL_BLOCKS = {"conversation": 42, "agentic": 182}
"""The threshold of the tail runs, in blocks of 512 tokens."""

SHOWN = ("conversation", "synthetic", "agentic")
STYLES: dict[str, dict[str, Any]] = {
    "hindsight": {"color": "grey", "ls": "--", "marker": "."},
    "wa": {"color": "C3", "marker": "o"},
    "wa, random labels": {"color": "C3", "ls": ":", "marker": "x"},
    "lru": {"color": "C0", "marker": "o"},
    "s3fifo": {"color": "C2", "ls": "-.", "marker": "."},
}


def random_labels(seed: int) -> Policy:
    """The placebo."""
    policy = make_policy("wa")
    randomise_categories(policy, seed)
    return policy


def one_curve() -> Policy:
    """WA without categories: every leaf ranks by the global curve."""
    policy: Any = make_policy("wa")
    policy.model.categories.refine = lambda names, *_: policy.model.categories.root
    return policy


PAPER: dict[str, dict[str, Any]] = {
    "wa, exponential, type-turn": {
        "model": "exponential",
        "reading": "formula",
        "categories": "type-turn",
    },
    "wa, type-turn": {"categories": "type-turn"},
}
"""The ATC 2025 paper's policy, and its categories with our curves."""

VARIANTS: dict[str, Callable[[int], Policy]] = {
    "wa": lambda seed: make_policy("wa"),
    "wa, random labels": random_labels,
    "wa, one curve": lambda seed: one_curve(),
    **{
        name: (lambda seed, options=options: make_policy("wa", options))
        for name, options in PAPER.items()
    },
    **{name: (lambda seed, name=name: make_policy(name)) for name in SIMPLE},
}


def traces(data: Path) -> Iterator[tuple[str, int, list[TraceRequest]]]:
    mooncake = data / "mooncake"
    yield "conversation", 0, list(open_trace(mooncake / "conversation_first60.jsonl", "mooncake"))
    yield "synthetic", 0, list(open_trace(mooncake / "synthetic_trace.jsonl", "mooncake"))
    archive = data / "agentic_coding" / "traces_500.tar.xz"
    for seed in SEEDS:
        yield "agentic", seed, list(overlay(archive, 200, 7200.0, seed))


def plan(name: str) -> Iterator[tuple[str, float]]:
    """Yield the policies and capacities of a trace's runs."""
    for capacity in CAPACITIES:
        yield "lru", capacity
        yield "wa", capacity
        if capacity in (0.05, 0.1) or name in ("conversation", "synthetic"):
            yield from ((v, capacity) for v in VARIANTS if v not in ("lru", "wa"))
            yield "hindsight", capacity


def hit_rows(
    name: str, seed: int, trace: list[TraceRequest], variants: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    distinct = distinct_blocks(trace)
    for policy, capacity in plan(name):
        if variants is not None and policy not in variants:
            continue
        if policy == "hindsight":
            made = make_hindsight("belady", Future(trace))
        else:
            made = VARIANTS[policy](seed)
        result = simulate(trace, made, max(1, int(distinct * capacity)))
        yield row(name, seed, policy, capacity, result, None)


def tail_rows(
    name: str, seed: int, trace: list[TraceRequest], variants: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    capacity = {"conversation": 0.1, "agentic": 0.07}[name]
    threshold = float(TAIL_BLOCKS[name] * 512)
    blocks = int(distinct_blocks(trace) * capacity)
    tail = {"threshold_tokens": threshold}
    runs = {
        "lru": make_policy("lru"),
        "wa": make_policy("wa"),
        "canopy-tlru": make_policy("canopy-tlru", tail),
        "etlru": make_policy("etlru", tail),
    }
    for policy, made in runs.items():
        if variants is not None and policy not in variants:
            continue
        result = simulate(trace, made, blocks, threshold_tokens=threshold)
        yield row(name, seed, policy, capacity, result, threshold)


def row(
    name: str, seed: int, policy: str, capacity: float, result: Any, threshold: float | None
) -> dict[str, Any]:
    return {
        "trace": name,
        "seed": seed,
        "policy": policy,
        "capacity_fraction": capacity,
        "capacity_blocks": result.capacity_blocks,
        "requests": result.requests,
        "block_hit_ratio": result.block_hit_ratio,
        "token_hit_ratio": result.token_hit_ratio,
        "uncached_tokens_p50": result.uncached_tokens_p50,
        "uncached_tokens_p90": result.uncached_tokens_p90,
        "uncached_tokens_p95": result.uncached_tokens_p95,
        "threshold_tokens": threshold,
        "tel_tokens": result.tel_tokens,
        "seconds": round(result.seconds, 3),
    }


def mean(rows: list[dict[str, Any]], key: str, **where: Any) -> float | None:
    found = [r[key] for r in rows if all(r[k] == v for k, v in where.items())]
    return statistics.fmean(found) if found else None


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """Hit ratio against capacity, mean of the seeds."""
    hits = [r for r in rows if r["threshold_tokens"] is None]
    names = [n for n in dict.fromkeys(r["trace"] for r in hits) if n in SHOWN]
    figure, panels = plt.subplots(
        1, len(names), figsize=(4.2 * len(names), 3.7), layout="constrained", squeeze=False
    )
    for panel, name in zip(panels[0], names):
        for policy, style in STYLES.items():
            points = [
                (100 * c, 100 * found)
                for c in CAPACITIES
                if (
                    found := mean(
                        hits, "block_hit_ratio", trace=name, policy=policy, capacity_fraction=c
                    )
                )
                is not None
            ]
            if points:
                panel.plot(*zip(*points), label=policy, **style)
        panel.set_xscale("log")
        ticks = [100 * c for c in CAPACITIES]
        panel.set_xticks(ticks, [f"{t:g}" for t in ticks])
        panel.minorticks_off()
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("capacity, % of distinct blocks")
        panel.set_ylabel("block hit ratio, %")
        panel.grid(alpha=0.25)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(), help="folder of the public traces")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for claims.json and claims.png"
    )
    parser.add_argument("--only", help="only the traces whose name starts so")
    parser.add_argument("--rows", type=Path, help="claims.json of an earlier run: no new runs")
    parser.add_argument("--variants", nargs="+", choices=[*VARIANTS, "etlru"], help="but of these")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.rows:
        rows = json.loads(args.rows.read_text())
        if args.variants:
            new = measure(args.data, args.only, args.variants)
            again = {(r["trace"], r["policy"]) for r in new}
            rows = [r for r in rows if (r["trace"], r["policy"]) not in again] + new
    else:
        rows = measure(args.data, args.only)
    if not args.rows or args.variants:
        result_file.write(args.out / "claims.json", rows)
    draw(rows, args.out / "claims.png")


def measure(
    data: Path, only: str | None, variants: list[str] | None = None
) -> list[dict[str, Any]]:
    """``variants``: the policies to run; all, if None."""
    rows: list[dict[str, Any]] = []
    with tqdm(unit="run", disable=None) as bar:
        for name, seed, trace in traces(data):
            if only and not name.startswith(only):
                continue
            bar.set_description(f"{name} {seed or ''}")
            made = [hit_rows(name, seed, trace, variants)]
            if name in TAIL_BLOCKS:
                made.append(tail_rows(name, seed, trace, variants))
            for source in made:
                for one in source:
                    rows.append(one)
                    bar.update()
    return rows


if __name__ == "__main__":
    main()
