"""The figure of capacity."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from canopy_lab.characterize.capacity import Capacity
from canopy_lab.report.axes import (
    AXES_FRAME,
    BLUE,
    GREEN,
    GREY,
    INK,
    MIXED_FRAME,
    clock_axis,
    name_axes,
    new_figure,
    note,
    percent_axis,
    round_step,
    title,
)
from canopy_lab.report.units import bytes_text, percent


def draw_capacity(capacity: Capacity) -> Figure:
    figure, axes = new_figure(2, widths=(3, 2))
    axis, live_axis = axes[0]
    share = np.array(capacity.lru_blocks) / capacity.distinct_blocks
    axis.plot(share, capacity.lru_hit_ratio, color=BLUE, linewidth=1.8)
    axis.axhline(capacity.ideal_hit_ratio, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)))
    ideal_label = f"ideal {percent(capacity.ideal_hit_ratio, 1)}"
    note(axis, ideal_label, (0.01, capacity.ideal_hit_ratio), GREY, (2, 4), MIXED_FRAME)
    needed = dict(capacity.lru_for_share)[0.9]
    target_ratio = 0.9 * capacity.ideal_hit_ratio
    axis.plot([needed / capacity.distinct_blocks], [target_ratio], "o", color=BLUE, markersize=4)
    label = f"90 % of it with {bytes_text(needed * capacity.block_bytes)},\n"
    label += f"{percent(needed / capacity.distinct_blocks, 1)} of the distinct blocks"
    note(axis, label, (0.98, 0.05), BLUE, frame=AXES_FRAME, ha="right")
    axis.set_xscale("log")
    axis.set_xlim(1e-4 if needed / capacity.distinct_blocks < 0.01 else 1e-3, 1)
    axis.set_ylim(0, max(1.12 * capacity.ideal_hit_ratio, 0.05))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g} %"))
    percent_axis(axis.yaxis)
    name_axes(axis, "capacity, share of the distinct blocks", "block hit ratio of LRU")
    title(axis, f"LRU has 90 % of the ideal hits with {bytes_text(needed * capacity.block_bytes)}")
    time_s = np.array(capacity.time_s)
    live_bytes = np.array(capacity.live_blocks) * capacity.block_bytes
    live_axis.plot(time_s, live_bytes, color=GREEN, linewidth=1.8)
    live_axis.fill_between(time_s, live_bytes, color=GREEN, alpha=0.15, linewidth=0)
    live_axis.set_ylim(0, 1.15 * max(live_bytes.max(), 1))
    unit_bytes = 1024.0 ** min(4, int(math.log(max(float(live_bytes.max()), 1.0), 1024.0)))
    tick_bytes = round_step(float(live_bytes.max()) / unit_bytes / 5) * unit_bytes
    live_axis.set_yticks(np.arange(0.0, 1.1 * float(live_bytes.max()) + tick_bytes, tick_bytes))
    live_axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: bytes_text(v) if v else "0"))
    clock_axis(live_axis, time_s[0], time_s[-1])
    live_axis.set_ylabel("blocks that will be used again", fontsize=8.5, color=INK)
    peak_bytes = capacity.live_peak * capacity.block_bytes
    title(live_axis, f"With the future known: {bytes_text(peak_bytes)}")
    return figure
