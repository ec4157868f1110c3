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
    ALONG,
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PINK,
    SKY,
    WHOLE,
    clock_axis,
    name_axes,
    new_figure,
    note,
    percent_axis,
    time_axis,
    title,
)
from canopy_lab.report.units import percent, seconds


def charts(report: TraceReport) -> Iterator[tuple[str, Figure]]:
    """Yield (question, figure) for every question that the trace answers."""
    drawn: tuple[tuple[str, Any, Callable[[Any], Figure]], ...] = (
        ("hits", report.hits, _hits),
        ("skew", report.skew, _skew),
        ("turns", report.turns, _turns),
        (
            "next_turn",
            report.turns if report.turns and report.turns.next_turn else None,
            _next_turn,
        ),
        ("reuse", report.reuse if report.reuse and report.reuse.all.reuses else None, _reuse),
        ("capacity", report.capacity, draw_capacity),
    )
    for name, answer, draw in drawn:
        if answer:
            yield name, draw(answer)


def _hits(h: IdealHits) -> Figure:
    bars = h.turns or h.kinds
    figure, axes = new_figure(2 if bars else 1, widths=(3, 2) if bars else None)
    ratio_axes = axes[0, 0]
    starts, ratio = np.array(h.window_start_s), np.array(h.window_hit_ratio)
    ratio_axes.step(
        np.append(starts, starts[-1] + h.window_s), np.append(ratio, ratio[-1]), where="post",
        color=BLUE, linewidth=1.8,
    )  # fmt: skip
    ratio_axes.axhline(h.block_hit_ratio, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)))
    text = f"whole trace {percent(h.block_hit_ratio, 1)}"
    note(ratio_axes, text, (1.0, h.block_hit_ratio), GREY, (-2, -30), ALONG, ha="right")
    ratio_axes.set_ylim(0, 1)
    percent_axis(ratio_axes.yaxis)
    clock_axis(ratio_axes, starts[0], starts[-1] + h.window_s)
    ratio_axes.set_ylabel("blocks seen before", fontsize=8.5, color=INK)
    title(ratio_axes, f"An endless cache would hit {percent(h.block_hit_ratio)} of the blocks")
    if bars:
        right = axes[0, 1]
        right.grid(False, axis="y")
        rows = bars[:6] if h.kinds and not h.turns else h.turns
        place = np.arange(len(rows))[::-1] * 1.0
        for offset, attribute, colour, name in (
            (0.2, "requests", SKY, "of the requests"),
            (-0.2, "hits", BLUE, "of the hits"),
        ):
            values = [getattr(r, attribute) for r in rows]
            right.barh(place + offset, values, 0.36, color=colour)
            for p, v in zip(place, values):
                text = f"{percent(v)} {name}" if p == place[0] else percent(v)
                note(right, text, (v, p + offset), INK, (4, 0), va="center")
        right.set_yticks(place, [r.name for r in rows])
        right.set_xlim(0, 1.35 if max(max(r.requests, r.hits) for r in rows) > 0.6 else 1)
        right.set_xticks([0, 0.5, 1.0])
        percent_axis(right.xaxis)
        right.set_xlabel("share", fontsize=8.5, color=INK)
        top = max(rows, key=lambda r: r.hits)
        title(right, f"{top.name.capitalize()} bring {percent(top.hits)} of the hits")
    return figure


def _skew(s: Skew) -> Figure:
    figure, axes = new_figure()
    axis = axes[0, 0]
    ends = []
    for curve, name, colour in (
        (s.block_reuses, "reuses, by block", BLUE),
        (s.conversation_hits, "hits, by conversation", ORANGE),
        (s.user_hits, "hits, by user", GREEN),
        (s.user_requests, "requests, by user", PINK),
    ):
        if curve is None:
            continue
        top, share = np.array(curve.top[1:]), np.array(curve.share[1:])
        shown = top >= 0.5 / max(curve.owners, 1)
        axis.plot(top[shown], share[shown], color=colour, linewidth=1.8)
        ends.append((name, colour, float(np.interp(0.01, top, share)), curve))
    axis.axvline(0.1, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)))
    text = f"10 % of the blocks:\n{percent(s.block_reuses.top_tenth)} of the reuses"
    note(axis, text, (0.1, s.block_reuses.top_tenth), BLUE, (8, -30))
    axis.plot([0.1], [s.block_reuses.top_tenth], "o", color=BLUE, markersize=4)
    axis.set_xscale("log")
    axis.set_xlim(1e-4, 1)
    axis.set_ylim(0, 1.02)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g} %"))
    percent_axis(axis.yaxis)
    name_axes(axis, "busiest owners, share of all", "what they hold")
    for i, (name, colour, _, _) in enumerate(ends):
        at = (0.012, 0.96 - 0.085 * i)
        note(axis, name, at, colour, frame=WHOLE, fontsize=8.5, va="top", fontweight="bold")
    title(
        axis,
        f"The busiest tenth of the blocks has {percent(s.block_reuses.top_tenth)} of the reuses",
    )
    return figure


def _turns(t: Turns) -> Figure:
    figure, axes = new_figure()
    axis = axes[0, 0]
    turn, beyond = np.array(t.turn), np.array(t.share_beyond)
    shown = beyond > 0
    axis.step(turn[shown], beyond[shown], where="post", color=BLUE, linewidth=1.8)
    axis.set_xscale("log")
    axis.set_yscale("log")
    ticks = [v for v in (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000) if v <= t.longest * 1.2]
    axis.set_xticks(ticks, [str(v) for v in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_locator(LogLocator(10))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g} %"))
    axis.yaxis.set_minor_locator(NullLocator())
    for q, at in ((0.5, t.p50), (0.9, t.p90), (0.99, t.p99)):
        axis.axhline(1 - q, color=FAINT, linewidth=0.8)
        text = f"P{100 * q:.0f}: turn {at:.0f}"
        note(axis, text, (1.0, 1 - q), GREY, (-2, 3), ALONG, ha="right")
    name_axes(axis, "turn number", "requests with a higher turn number")
    title(
        axis,
        f"{percent(t.first_turn_share)} of the requests are first turns; the longest "
        f"conversation has {t.longest}",
    )
    return figure


def _next_turn(t: Turns) -> Figure:
    rows = t.next_turn
    figure, axes = new_figure(height=1.3 + 0.26 * len(rows))
    axis = axes[0, 0]
    axis.grid(False)
    picture = np.ma.masked_invalid(np.array([r.over_time for r in rows]))
    start, end = t.window_start_s[0], t.window_start_s[-1] + t.window_s
    image = axis.imshow(
        picture, aspect="auto", cmap="cividis", vmin=0, vmax=1,
        extent=(start, end, len(rows) - 0.5, -0.5),
    )  # fmt: skip
    axis.set_facecolor("#F2F2F2")
    axis.set_yticks(range(len(rows)), [r.name for r in rows])
    for i, row in enumerate(rows):
        text = f"{row.probability:.2f}   {row.requests:,} requests"
        note(axis, text, (1.01, i), INK, frame=ALONG, va="center", annotation_clip=False)
    clock_axis(axis, start, end)
    bar = figure.colorbar(image, ax=axis, location="bottom", shrink=0.4, aspect=30, pad=0.02)
    bar.set_label("probability that another turn follows (grey: under 20 requests)", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    title(
        axis,
        f"Another turn follows a first turn with {t.first_next:.2f}, a later one with "
        f"{t.later_next:.2f}",
    )
    return figure


def _reuse(times: ReuseTimes) -> Figure:
    shown = [times.all, *times.categories[:5]]
    if len(times.categories) == 1:
        shown = [times.all]
    columns = min(3, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure, axes = new_figure(columns, rows, height=2.7 if len(shown) > 1 else 3.4)
    first = 0.1
    for i, (axis, r) in enumerate(zip(axes.flat, shown)):
        age = np.array(r.age_s)
        keep = age > 0
        late = max(age[-1], 10.0)
        if r.p50_s < 1.0:
            first = 0.001
        axis.step(age[keep], np.array(r.observed)[keep], where="post", color=INK, linewidth=2.2)
        axis.plot(age[keep], np.array(r.survival)[keep], color=BLUE, linewidth=1.4)
        axis.plot(
            age[keep], np.array(r.exponential)[keep], color=ORANGE, linewidth=1.4,
            linestyle=(0, (5, 2)),
        )  # fmt: skip
        time_axis(axis, late, first)
        axis.set_ylim(0, min(1.05, max(0.05, 1.25 * max(*r.observed, *r.exponential))))
        percent_axis(axis.yaxis)
        title(axis, r.name if r.name != "all" else "all categories")
        if i >= len(shown) - columns:
            axis.set_xlabel("time since last use", fontsize=8.5, color=INK)
        if i % columns == 0:
            axis.set_ylabel("blocks used again by then", fontsize=8.5, color=INK)
        if columns == 3:
            wide = first < 0.1 or late > 7200
            ticks = [t for t in ((0.001, 0.1, 10, 600) if wide else (0.1, 1, 60, 600)) if t <= late]
            ticks = [t for t in ticks if t >= first] + ([36000] if late > 36000 else [])
            axis.set_xticks(ticks, [seconds(t) for t in ticks])
        if i == 0:
            for k, (name, colour) in enumerate(
                (("observed", INK), ("survival fit", BLUE), ("exponential fit", ORANGE))
            ):
                at = (0.03, 0.96 - 0.1 * k)
                note(axis, name, at, colour, frame=WHOLE, va="top", fontweight="bold")
    for axis in list(axes.flat)[len(shown) :]:
        axis.set_visible(False)
    return figure
