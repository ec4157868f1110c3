"""Shared style of the characterisation figures: palette, grids and axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from canopy_lab.report.units import seconds

# Okabe and Ito's palette: distinct for every type of colour vision, and in grey.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
PINK, SKY, GREY = "#CC79A7", "#56B4E9", "#6B6B6B"
INK, FAINT = "#222222", "#D9D9D9"
AXES_FRAME = "axes fraction"
MIXED_FRAME = (AXES_FRAME, "data")
"""Frames of a note: the axes, and the axes across with the data upwards."""
_TIME_TICKS_S = (0.001, 0.01, 0.1, 1, 10, 60, 600, 3600, 6 * 3600, 86400)


def new_figure(
    columns: int = 1, rows: int = 1, height: float = 3.4, widths: Sequence[float] | None = None
) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(8.6, height * rows), dpi=150)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.08)
    axes = figure.subplots(rows, columns, squeeze=False, gridspec_kw={"width_ratios": widths})
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(GREY)
        panel.tick_params(which="both", colors=INK, labelsize=8)
        panel.grid(True, color=FAINT, linewidth=0.6)
        panel.set_axisbelow(True)
    return figure, axes


def title(axes: Axes, text: str) -> None:
    axes.set_title(text, fontsize=9.5, color=INK, loc="left", fontweight="bold")


def note(
    axes: Axes, text: str, xy: tuple[float, float], colour: str = GREY,
    move: tuple[float, float] = (0, 0), frame: Any = "data", **style: Any,
) -> None:  # fmt: skip
    """Write ``text`` at a point of ``frame`` (matplotlib's ``xycoords``), moved by ``move`` points."""
    style = {"fontsize": 8, **style}
    axes.annotate(text, xy, move, xycoords=frame, textcoords="offset points", color=colour, **style)


def name_axes(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label, fontsize=8.5, color=INK)
    axes.set_ylabel(y_label, fontsize=8.5, color=INK)


def percent_axis(axis: Axis) -> None:
    axis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))


def time_axis(axes: Axes, longest_s: float, shortest_s: float = 0.1) -> None:
    """Make the x axis logarithmic, with readable times as ticks."""
    axes.set_xscale("log")
    ticks = [t for t in _TIME_TICKS_S if shortest_s <= t <= longest_s * 1.01]
    axes.set_xticks(ticks, [seconds(t) for t in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(shortest_s, longest_s)


def clock_axis(axes: Axes, start_s: float, end_s: float) -> None:
    """Make a linear x axis of the trace's own time, in minutes or hours."""
    unit_s, name = (3600.0, "hours") if end_s - start_s > 3 * 3600 else (60.0, "minutes")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{(v - start_s) / unit_s:g}"))
    step = next(
        s
        for s in (1, 2, 5, 10, 15, 20, 30, 60, 120, 240, 1440)
        if (end_s - start_s) / unit_s / s <= 8 or s == 1440
    )
    axes.set_xticks(np.arange(start_s, end_s + 1e-9, step * unit_s))
    axes.set_xlabel(f"time in the trace ({name})", fontsize=8.5, color=INK)


def round_step(value: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least ``value``."""
    power = 10.0 ** math.floor(math.log10(max(value, 1e-9)))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= value)
