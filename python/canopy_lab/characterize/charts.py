"""Figures of a characterisation. Each has its result in its title."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from canopy_lab.characterize.capacity_chart import draw_capacity
from canopy_lab.characterize.hits import IdealHits
from canopy_lab.characterize.reuse_time import ReuseTimes
from canopy_lab.characterize.skew import Skew
from canopy_lab.characterize.trace_report import TraceReport
from canopy_lab.characterize.turns import Turns
from canopy_lab.report.axes import (
    AXES_FRAME,
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    MIXED_FRAME,
    ORANGE,
    PINK,
    SKY,
    clock_axis,
    name_axes,
    new_figure,
    note,
    percent_axis,
    time_axis,
    title,
)
from canopy_lab.report.units import percent, seconds


def draw_charts(report: TraceReport) -> Iterator[tuple[str, Figure]]:
    """Yield (question, figure) for every question that the trace answers."""
    next_turn = report.turns if report.turns and report.turns.next_turn else None
    figures: tuple[tuple[str, Any, Callable[[Any], Figure]], ...] = (
        ("hits", report.hits, _hits),
        ("skew", report.skew, _skew),
        ("turns", report.turns, _turns),
        ("next_turn", next_turn, _next_turn),
        ("reuse", report.reuse if report.reuse and report.reuse.all.reuses else None, _reuse),
        ("capacity", report.capacity, draw_capacity),
    )
    for name, answer, draw in figures:
        if answer:
            yield name, draw(answer)


def _hits(hits: IdealHits) -> Figure:
    bars = hits.turns or hits.kinds
    figure, axes = new_figure(2 if bars else 1, widths=(3, 2) if bars else None)
    ratio_axes = axes[0, 0]
    starts, ratio = np.array(hits.window_start_s), np.array(hits.window_hit_ratio)
    ratio_axes.step(
        np.append(starts, starts[-1] + hits.window_s), np.append(ratio, ratio[-1]), where="post",
        color=BLUE, linewidth=1.8,
    )  # fmt: skip
    ratio_axes.axhline(hits.block_hit_ratio, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)))
    text = f"whole trace {percent(hits.block_hit_ratio, 1)}"
    note(ratio_axes, text, (1.0, hits.block_hit_ratio), GREY, (-2, -30), MIXED_FRAME, ha="right")
    ratio_axes.set_ylim(0, 1)
    percent_axis(ratio_axes.yaxis)
    clock_axis(ratio_axes, starts[0], starts[-1] + hits.window_s)
    ratio_axes.set_ylabel("blocks seen before", fontsize=8.5, color=INK)
    title(ratio_axes, f"An endless cache would hit {percent(hits.block_hit_ratio)} of the blocks")
    if bars:
        share_axes = axes[0, 1]
        share_axes.grid(False, axis="y")
        rows = bars[:6] if hits.kinds and not hits.turns else hits.turns
        positions = np.arange(len(rows))[::-1] * 1.0
        for offset, attribute, colour, name in (
            (0.2, "requests", SKY, "of the requests"),
            (-0.2, "hits", BLUE, "of the hits"),
        ):
            values = [getattr(r, attribute) for r in rows]
            share_axes.barh(positions + offset, values, 0.36, color=colour)
            for p, v in zip(positions, values):
                text = f"{percent(v)} {name}" if p == positions[0] else percent(v)
                note(share_axes, text, (v, p + offset), INK, (4, 0), va="center")
        share_axes.set_yticks(positions, [r.name for r in rows])
        share_axes.set_xlim(0, 1.35 if max(max(r.requests, r.hits) for r in rows) > 0.6 else 1)
        share_axes.set_xticks([0, 0.5, 1.0])
        percent_axis(share_axes.xaxis)
        share_axes.set_xlabel("share", fontsize=8.5, color=INK)
        busiest = max(rows, key=lambda r: r.hits)
        title(share_axes, f"{busiest.name.capitalize()} bring {percent(busiest.hits)} of the hits")
    return figure


def _skew(skew: Skew) -> Figure:
    figure, axes = new_figure()
    axis = axes[0, 0]
    legend = []
    for curve, name, colour in (
        (skew.block_reuses, "reuses, by block", BLUE),
        (skew.conversation_hits, "hits, by conversation", ORANGE),
        (skew.user_hits, "hits, by user", GREEN),
        (skew.user_requests, "requests, by user", PINK),
    ):
        if curve is None:
            continue
        owner_share, share = np.array(curve.top[1:]), np.array(curve.share[1:])
        is_shown = owner_share >= 0.5 / max(curve.owners, 1)
        axis.plot(owner_share[is_shown], share[is_shown], color=colour, linewidth=1.8)
        legend.append((name, colour, float(np.interp(0.01, owner_share, share)), curve))
    axis.axvline(0.1, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)))
    text = f"10 % of the blocks:\n{percent(skew.block_reuses.top_tenth)} of the reuses"
    note(axis, text, (0.1, skew.block_reuses.top_tenth), BLUE, (8, -30))
    axis.plot([0.1], [skew.block_reuses.top_tenth], "o", color=BLUE, markersize=4)
    axis.set_xscale("log")
    axis.set_xlim(1e-4, 1)
    axis.set_ylim(0, 1.02)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g} %"))
    percent_axis(axis.yaxis)
    name_axes(axis, "busiest owners, share of all", "what they hold")
    for i, (name, colour, _, _) in enumerate(legend):
        position = (0.012, 0.96 - 0.085 * i)
        font: dict[str, Any] = {"fontsize": 8.5, "fontweight": "bold"}
        note(axis, name, position, colour, frame=AXES_FRAME, va="top", **font)
    title(
        axis,
        f"The busiest tenth of the blocks has {percent(skew.block_reuses.top_tenth)} of the reuses",
    )
    return figure


def _turns(turns: Turns) -> Figure:
    figure, axes = new_figure()
    axis = axes[0, 0]
    turn, beyond = np.array(turns.turn), np.array(turns.share_beyond)
    is_shown = beyond > 0
    axis.step(turn[is_shown], beyond[is_shown], where="post", color=BLUE, linewidth=1.8)
    axis.set_xscale("log")
    axis.set_yscale("log")
    ticks = [v for v in (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000) if v <= turns.longest * 1.2]
    axis.set_xticks(ticks, [str(v) for v in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_locator(LogLocator(10))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g} %"))
    axis.yaxis.set_minor_locator(NullLocator())
    for quantile, turn_at in ((0.5, turns.p50), (0.9, turns.p90), (0.99, turns.p99)):
        axis.axhline(1 - quantile, color=FAINT, linewidth=0.8)
        text = f"P{100 * quantile:.0f}: turn {turn_at:.0f}"
        note(axis, text, (1.0, 1 - quantile), GREY, (-2, 3), MIXED_FRAME, ha="right")
    name_axes(axis, "turn number", "requests with a higher turn number")
    title(
        axis,
        f"{percent(turns.first_turn_share)} of the requests are first turns; the longest "
        f"conversation has {turns.longest}",
    )
    return figure


def _next_turn(turns: Turns) -> Figure:
    rows = turns.next_turn
    figure, axes = new_figure(height=1.3 + 0.26 * len(rows))
    axis = axes[0, 0]
    axis.grid(False)
    probabilities = np.ma.masked_invalid(np.array([row.over_time for row in rows]))
    start_s, end_s = turns.window_start_s[0], turns.window_start_s[-1] + turns.window_s
    image = axis.imshow(
        probabilities, aspect="auto", cmap="cividis", vmin=0, vmax=1,
        extent=(start_s, end_s, len(rows) - 0.5, -0.5),
    )  # fmt: skip
    axis.set_facecolor("#F2F2F2")
    axis.set_yticks(range(len(rows)), [row.name for row in rows])
    for i, row in enumerate(rows):
        text = f"{row.probability:.2f}   {row.requests:,} requests"
        note(axis, text, (1.01, i), INK, frame=MIXED_FRAME, va="center", annotation_clip=False)
    clock_axis(axis, start_s, end_s)
    bar = figure.colorbar(image, ax=axis, location="bottom", shrink=0.4, aspect=30, pad=0.02)
    bar.set_label("probability that another turn follows (grey: under 20 requests)", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    title(
        axis,
        f"Another turn follows a first turn with {turns.first_next:.2f}, a later one with "
        f"{turns.later_next:.2f}",
    )
    return figure


def _reuse(times: ReuseTimes) -> Figure:
    shown = [times.all, *times.categories[:5]]
    if len(times.categories) == 1:
        shown = [times.all]
    columns = min(3, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure, axes = new_figure(columns, rows, height=2.7 if len(shown) > 1 else 3.4)
    first_s = 0.1
    for i, (axis, reuse) in enumerate(zip(axes.flat, shown)):
        age_s = np.array(reuse.age_s)
        mask = age_s > 0
        end = max(age_s[-1], 10.0)
        if reuse.p50_s < 1.0:
            first_s = 0.001
        axis.step(age_s[mask], np.array(reuse.observed)[mask], where="post", color=INK, lw=2.2)
        axis.plot(age_s[mask], np.array(reuse.survival)[mask], color=BLUE, linewidth=1.4)
        axis.plot(
            age_s[mask], np.array(reuse.exponential)[mask], color=ORANGE, linewidth=1.4,
            linestyle=(0, (5, 2)),
        )  # fmt: skip
        time_axis(axis, end, first_s)
        axis.set_ylim(0, min(1.05, max(0.05, 1.25 * max(*reuse.observed, *reuse.exponential))))
        percent_axis(axis.yaxis)
        title(axis, reuse.name if reuse.name != "all" else "all categories")
        if i >= len(shown) - columns:
            axis.set_xlabel("time since last use", fontsize=8.5, color=INK)
        if i % columns == 0:
            axis.set_ylabel("blocks used again by then", fontsize=8.5, color=INK)
        if columns == 3:
            wide = first_s < 0.1 or end > 7200
            ticks = [t for t in ((0.001, 0.1, 10, 600) if wide else (0.1, 1, 60, 600)) if t <= end]
            ticks = [t for t in ticks if t >= first_s] + ([36000] if end > 36000 else [])
            axis.set_xticks(ticks, [seconds(t) for t in ticks])
        if i == 0:
            for line, (name, colour) in enumerate(
                (("observed", INK), ("survival fit", BLUE), ("exponential fit", ORANGE))
            ):
                position = (0.03, 0.96 - 0.1 * line)
                note(axis, name, position, colour, frame=AXES_FRAME, va="top", fontweight="bold")
    for axis in list(axes.flat)[len(shown) :]:
        axis.set_visible(False)
    return figure
