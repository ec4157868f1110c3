"""Draw the result of ``canopy simulate``: hit ratio against capacity, and the distance to the bound.

    canopy simulate T --format mooncake --policy canopy-lru,wa,belady --capacity 0.02,0.1 --json-out rows.json
    python benchmark/eviction/hit_ratio.py rows.json --out conversation.png

Several files, such as overlays with other seeds, are drawn as means with their range.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from canopy_lab.sim.hindsight import hindsight_names
from canopy_lab.sim.stack import lru_curve
from canopy_lab.sim.sweep_table import BOUND, by_cell, mean
from canopy_lab.trace.open import open_trace

_COLOURS = (
    "#0b6e4f", "#d1495b", "#3366aa", "#e09f3e", "#7a4fa3", "#2a9d8f",
    "#8c564b", "#c44e9d", "#5f6b73", "#a3b18a", "#264653", "#b56576",
)  # fmt: skip
LRU = {"lru", "canopy-lru"}
_MARKERS = "osD^vPX<>*hd"


def hit_ratio_figure(
    path: Path | str,
    rows: Sequence[Mapping[str, Any]],
    lru: Sequence[tuple[np.ndarray, np.ndarray]],
    *,
    title: str,
    ideal: float,
) -> None:
    """Draw ``rows`` of a sweep into ``path`` (its suffix is the format).

    ``lru`` gives, for each trace, LRU's block hit ratio (second array) at many capacities as
    fractions of the distinct blocks (first array); it is drawn as a line without markers.
    ``ideal`` is the block hit ratio of an endless cache. Several seeds: means, with the
    range as a band.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure, axes = plt.subplots(figsize=(8.4, 5.2), layout="constrained")
    series = _series(rows)
    span = np.array(sorted({x for xs, *_ in series.values() for x in xs}))
    bound = series.pop(BOUND, None)
    axes.axhline(100 * ideal, color="0.55", lw=1, ls=":", label="endless cache")
    if bound is not None:
        xs, middle, _, _ = bound
        axes.plot(xs, middle, color="black", ls="--", lw=1.6, label="hindsight bound (belady)")
        online = [s for label, s in series.items() if not _hindsight(label)]
        if online:
            best = np.max([np.interp(xs, s[0], s[1]) for s in online], axis=0)
            axes.fill_between(
                xs, best, middle, color="black", alpha=0.06, lw=0, label="left to win"
            )
    dense = _dense_lru(lru, span)
    lru_drawn = bool(LRU & set(series)) and dense is not None
    for at, (label, (xs, middle, low, high)) in enumerate(sorted(series.items(), key=_last)):
        colour = "0.35" if label in LRU else _COLOURS[at % len(_COLOURS)]
        style = ":" if label.endswith("(placebo)") else "--" if _hindsight(label) else "-"
        if label in LRU and dense is not None:
            axes.plot(*dense, color=colour, lw=1.8, label="lru (every capacity)")
            axes.plot(xs, middle, color=colour, ls="", marker="o", ms=4)
            continue
        marker = _MARKERS[at % len(_MARKERS)]
        axes.plot(xs, middle, color=colour, marker=marker, ms=4.5, lw=1.5, ls=style, label=label)
        if np.any(high > low):
            axes.fill_between(xs, low, high, color=colour, alpha=0.15, lw=0)
    if not lru_drawn and dense is not None:
        axes.plot(*dense, color="0.35", lw=1.2, label="lru (every capacity)")
    axes.set_xscale("log")
    axes.set_xlim(span.min() * 0.93, span.max() * 1.07)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:g} %"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    ticks = span if len(span) <= 12 else span[:: -(-len(span) // 12)]
    axes.set_xticks(ticks)
    axes.set_xlabel("capacity, share of the trace's distinct blocks")
    axes.set_ylabel("block hit ratio, %")
    axes.set_ylim(bottom=0)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.savefig(path, dpi=160)
    plt.close(figure)


Series = dict[str, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]


def _series(rows: Sequence[Mapping[str, Any]]) -> Series:
    """Per line: capacities, and mean, least and greatest hit ratio (%) over the seeds."""
    points: dict[str, list[tuple[float, float, float, float]]] = {}
    for (label, _), group in by_cell(rows).items():
        hits = [100 * row["block_hit_ratio"] for row in group]
        point = (mean(group, "capacity_fraction"), float(np.mean(hits)), min(hits), max(hits))
        points.setdefault(label, []).append(point)
    series: Series = {}
    for label, line in points.items():
        xs, middle, low, high = np.array(sorted(line)).T
        series[label] = (xs, middle, low, high)
    return series


def _hindsight(label: str) -> bool:
    return label.split(":")[0].split(" ")[0] in hindsight_names()


def _last(item: tuple[str, tuple[np.ndarray, ...]]) -> float:
    return -float(item[1][1].mean())


def _dense_lru(
    lru: Sequence[tuple[np.ndarray, np.ndarray]], span: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    if not lru or len(span) < 2:
        return None
    xs = np.geomspace(span.min(), span.max(), 240)
    return xs, 100 * np.mean([np.interp(xs, *curve) for curve in lru], axis=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rows", nargs="+", type=Path, help="of canopy simulate --json")
    parser.add_argument("--out", type=Path, required=True, help="the figure")
    args = parser.parse_args()
    rows, curves, ideals = [], [], []
    for seed, path in enumerate(args.rows):
        found = json.loads(path.read_text())
        rows += [{**row, "seed": seed} for row in found]
        curve = lru_curve(open_trace(found[0]["trace"], found[0]["format"]))
        capacities = np.arange(len(curve.block_hits_at)) / curve.distinct_blocks
        curves.append((capacities, curve.block_hits_at / curve.blocks))
        ideals.append(curve.block_hits_at[-1] / curve.blocks)
    title = f"{Path(rows[0]['trace']).name}: {rows[0]['requests']:,} requests"
    hit_ratio_figure(args.out, rows, curves, title=title, ideal=float(np.mean(ideals)))


if __name__ == "__main__":
    main()
