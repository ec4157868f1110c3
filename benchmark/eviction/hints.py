"""Gain of hints about the future: hit ratio by the share of clients that give them, and by accuracy.

    python benchmark/eviction/hints.py --data DIR --out OUT

After each response a client hints either that its conversation is over, or the seconds until it
continues. The truth is the trace's own future; a false hint is the opposite (over or not), or another
client's time. True hints of agents are also run without the names of their sessions: a conversation
with a rewritten history then looks over. Writes OUT/hints.json and OUT/hints.png; with
`--rows OUT/hints.json` only the figure, from an earlier run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from tqdm import tqdm

from canopy_lab.sim.driver import distinct_blocks, simulate
from canopy_lab.sim.hindsight import make_hindsight
from canopy_lab.sim.hindsight.future import Future
from canopy_lab.sim.requests import Hints
from canopy_lab.trace.open import open_trace
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.registry import make_policy

sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in ("", "traces")]
from overlays import overlay

import result_file

SHARES = (0.0, 0.25, 0.5, 1.0)
ACCURACIES = (1.0, 0.75, 0.5, 0.0)
CAPACITY = 0.05
DRAWN = ("conversation", "agentic")
"""Traces of the figure, with hints of every accuracy."""


def traces(data: Path) -> Iterator[tuple[str, tuple[int, ...], list[TraceRequest]]]:
    """Name, seeds of the hints, requests."""
    path = data / "mooncake" / "conversation_first60.jsonl"
    yield "conversation", (1, 2), list(open_trace(path, "mooncake"))
    archive = data / "agentic_coding" / "traces_500.tar.xz"
    agents = list(overlay(archive, 200, 7200.0, 1))
    yield "agentic", (1,), agents
    yield "agentic, no names", (1,), [replace(request, conversation=None) for request in agents]


def runs(name: str, seeds: tuple[int, ...], trace: list[TraceRequest]) -> Iterator[dict[str, Any]]:
    blocks = int(distinct_blocks(trace) * CAPACITY)
    bounds = {"lru": make_policy("lru"), "hindsight": make_hindsight("belady", Future(trace))}
    for bound, policy in bounds.items():
        hit = simulate(trace, policy, blocks).block_hit_ratio
        yield {"trace": name, "policy": bound, "block_hit_ratio": hit}
    for accuracy in ACCURACIES if name in DRAWN else ACCURACIES[:1]:
        for share in SHARES if accuracy == 1.0 else SHARES[1:]:
            for seed in seeds if share else seeds[:1]:
                hints = Hints(share=share, accuracy=accuracy, seed=seed)
                hit = simulate(trace, make_policy("wa"), blocks, hints=hints).block_hit_ratio
                yield {
                    "trace": name,
                    "policy": "wa",
                    "share": share,
                    "accuracy": accuracy,
                    "seed": seed,
                    "block_hit_ratio": hit,
                }


def mean(rows: list[dict[str, Any]], **where: Any) -> float:
    """Mean hit ratio in % of the rows that agree with ``where``."""
    found = [r for r in rows if all(r.get(k) == v for k, v in where.items())]
    return 100 * statistics.fmean(r["block_hit_ratio"] for r in found)


def _hits(rows: list[dict[str, Any]], name: str, share: float, accuracy: float) -> float:
    return mean(rows, trace=name, share=share, accuracy=accuracy if share else 1.0)


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    names = DRAWN
    figure, panels = plt.subplots(
        1, len(names), figsize=(4.6 * len(names), 3.8), layout="constrained", squeeze=False
    )
    colours = plt.get_cmap("viridis")
    for panel, name in zip(panels[0], names):
        for i, accuracy in enumerate(ACCURACIES):
            hits = [_hits(rows, name, s, accuracy) for s in SHARES]
            shade = colours(0.9 * i / (len(ACCURACIES) - 1))
            label = f"{accuracy:.0%} of hints true"
            panel.plot([100 * s for s in SHARES], hits, "o-", color=shade, label=label)
        for policy, style in (("hindsight", "--"), ("lru", ":")):
            panel.axhline(mean(rows, trace=name, policy=policy), color="grey", ls=style)
            panel.annotate(
                policy,
                (0, mean(rows, trace=name, policy=policy)),
                xytext=(0, -11 if policy == "hindsight" else 3),
                textcoords="offset points",
                color="grey",
            )
        panel.set_title(f"{name}, {CAPACITY:.0%} of distinct blocks", fontsize=10)
        panel.set_xlabel("clients that give hints, %")
        panel.set_ylabel("block hit ratio, %")
        panel.grid(alpha=0.25)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(), help="folder of the public traces")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--rows", type=Path, help="hints.json of an earlier run: no new runs")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.rows:
        rows = json.loads(args.rows.read_text())
    else:
        rows = measure(args.data)
        result_file.write(args.out / "hints.json", rows)
    draw(rows, args.out / "hints.png")


def measure(data: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tqdm(unit="run", disable=None) as bar:
        for name, seeds, trace in traces(data):
            bar.set_description(name)
            for row in runs(name, seeds, trace):
                rows.append(row)
                bar.update()
    return rows


if __name__ == "__main__":
    main()
