"""The figures about room and policies: capacity, hit ratio by policy, gain over LRU."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from canopy_lab.characterize.report import TraceReport
from canopy_lab.report.characterize_axes import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PINK,
    SKY,
    capacity_label,
    clock_axis,
    name_axes,
    new_figure,
    percent_axis,
    round_step,
    title,
)
from canopy_lab.report.characterize_text import percent, size


def draw_capacity(report: TraceReport) -> Figure:
    c = report.capacity
    assert c is not None
    figure, axes = new_figure(2, widths=(3, 2))
    one, right = axes[0]
    blocks = np.array(c.lru_blocks)
    share = blocks / c.distinct_blocks
    one.plot(share, c.lru_hit_ratio, color=BLUE, linewidth=1.8)
    one.axhline(c.ideal_hit_ratio, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)))
    one.annotate(
        f"ideal {percent(c.ideal_hit_ratio, 1)}", (0.01, c.ideal_hit_ratio), (2, 4),
        xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=8, color=GREY,
    )  # fmt: skip
    need = dict(c.lru_for_share)[0.9]
    at = 0.9 * c.ideal_hit_ratio
    one.plot([need / c.distinct_blocks], [at], "o", color=BLUE, markersize=4)
    one.annotate(
        f"90 % of it with {size(need * c.block_bytes)},\n"
        f"{percent(need / c.distinct_blocks, 1)} of the distinct blocks",
        (0.98, 0.05), xycoords="axes fraction", fontsize=8, color=BLUE, ha="right",
    )  # fmt: skip
    one.set_xscale("log")
    one.set_xlim(1e-4 if need / c.distinct_blocks < 0.01 else 1e-3, 1)
    one.set_ylim(0, max(1.12 * c.ideal_hit_ratio, 0.05))
    one.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g} %"))
    percent_axis(one.yaxis)
    name_axes(one, "capacity, share of the distinct blocks", "block hit ratio of LRU")
    title(one, f"LRU has 90 % of the ideal hits with {size(need * c.block_bytes)}")
    time, live = np.array(c.time_s), np.array(c.live_blocks) * c.block_bytes
    right.plot(time, live, color=GREEN, linewidth=1.8)
    right.fill_between(time, live, color=GREEN, alpha=0.15, linewidth=0)
    right.set_ylim(0, 1.15 * max(live.max(), 1))
    unit = 1024.0 ** min(4, int(math.log(max(float(live.max()), 1.0), 1024.0)))
    tick = round_step(float(live.max()) / unit / 5) * unit
    right.set_yticks(np.arange(0.0, 1.1 * float(live.max()) + tick, tick))
    right.yaxis.set_major_formatter(FuncFormatter(lambda v, _: size(v) if v else "0"))
    clock_axis(right, time[0], time[-1])
    right.set_ylabel("blocks that will be used again", fontsize=8.5, color=INK)
    title(right, f"With the future known: {size(c.live_peak * c.block_bytes)}")
    return figure


def draw_policies(report: TraceReport) -> Figure:
    r = report.recommendation
    assert r is not None
    figure, axes = new_figure(height=3.8)
    one = axes[0, 0]
    x = np.array(r.fractions)
    names = sorted(r.table, key=lambda n: -sum(r.table[n]))
    colours = {"lru": GREY, "wa": BLUE, "wa, exponential": SKY, "s3fifo": ORANGE, "gdfs": PINK}
    for name in names:
        mark = {"lru": "o", "wa": "o", "wa, exponential": "s", "s3fifo": "^", "gdfs": "v"}[name]
        one.plot(
            x, r.table[name], color=colours[name], marker=mark, markersize=4, linewidth=1.6,
            linestyle="-" if name in ("lru", "wa") else (0, (4, 2)),
        )  # fmt: skip
    one.axhline(r.ideal_hit_ratio, color=INK, linewidth=1.0, linestyle=(0, (1, 2)))
    one.annotate(
        f"ideal {percent(r.ideal_hit_ratio, 1)}", (0.01, r.ideal_hit_ratio), (2, 4),
        xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=8, color=INK,
    )  # fmt: skip
    one.set_xscale("log")
    one.set_xticks(x, [capacity_label(v) for v in x])
    one.xaxis.set_minor_locator(NullLocator())
    one.set_xlim(x[0] * 0.85, x[-1] * 1.1)
    one.set_ylim(0, 1.12 * r.ideal_hit_ratio)
    percent_axis(one.yaxis)
    name_axes(one, "capacity, share of the distinct blocks", "token hit ratio")
    for i, name in enumerate(names):
        one.annotate(
            f"{name}   {percent(r.table[name][1], 1)} at {capacity_label(x[1])}", (0.985, 0.06 + 0.07 * (len(names) - 1 - i)),
            xycoords="axes fraction", fontsize=8.5, color=colours[name], fontweight="bold",
            ha="right",
        )  # fmt: skip
    best = "LRU" if r.policy == "lru" else r.policy
    title(
        one, f"{best} is the one to use" if best != "LRU" else "No policy beats LRU with confidence"
    )
    return figure


def draw_gain(report: TraceReport) -> Figure:
    r = report.recommendation
    assert r is not None
    figure, axes = new_figure()
    one = axes[0, 0]
    place = np.arange(len(r.gains))
    points = np.array([g.points for g in r.gains])
    low, high = np.array([g.low for g in r.gains]), np.array([g.high for g in r.gains])
    one.axhline(0.0, color=GREY, linewidth=1.0)
    one.errorbar(
        place - 0.1, points, np.abs(np.array([points - low, high - points])), fmt="o", color=BLUE,
        markersize=5, capsize=3, linewidth=1.6,
    )  # fmt: skip
    shuffled = np.array([g.placebo_points for g in r.gains])
    spread = np.abs(
        np.array(
            [[g.placebo_points - g.placebo_low, g.placebo_high - g.placebo_points] for g in r.gains]
        )
    ).T
    one.errorbar(
        place + 0.1, shuffled, spread, fmt="s", color=ORANGE, markersize=4, capsize=3,
        linewidth=1.2,
    )  # fmt: skip
    for p, value in zip(place, points):
        one.annotate(
            f"{value:+.1f}", (p - 0.1, value), (-6, 1), textcoords="offset points", fontsize=8,
            color=BLUE, ha="right", va="bottom",
        )  # fmt: skip
    one.set_xticks(
        place, [f"{capacity_label(g.fraction)}\nLRU has {percent(g.lru_share)}" for g in r.gains]
    )
    one.set_xlim(-0.6, len(place) - 0.4)
    name_axes(
        one, "capacity, share of the distinct blocks, and what LRU has there of the ideal hits",
        "points of token hit ratio over LRU",
    )  # fmt: skip
    one.annotate(
        f"{r.policy}, 95 % over {r.cluster_count:,} {r.clusters}", (0.985, 0.95),
        xycoords="axes fraction", fontsize=8.5, color=BLUE, fontweight="bold", ha="right", va="top",
    )  # fmt: skip
    one.annotate(
        "with shuffled labels (placebo), 3 seeds", (0.985, 0.87), xycoords="axes fraction",
        fontsize=8.5, color=ORANGE, fontweight="bold", ha="right", va="top",
    )  # fmt: skip
    best = max(r.gains, key=lambda g: g.points)
    title(
        one,
        f"{r.policy} over LRU: up to {best.points:+.1f} points, at {capacity_label(best.fraction)}",
    )
    return figure
