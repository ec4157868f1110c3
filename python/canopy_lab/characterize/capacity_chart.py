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
from canopy_lab.report.units import percent, size


def draw_capacity(c: Capacity) -> Figure:
    figure, axes = new_figure(2, widths=(3, 2))
    axis, live_axis = axes[0]
    share = np.array(c.lru_blocks) / c.distinct_blocks
    axis.plot(share, c.lru_hit_ratio, color=BLUE, linewidth=1.8)
    axis.axhline(c.ideal_hit_ratio, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)))
    ideal_label = f"ideal {percent(c.ideal_hit_ratio, 1)}"
    note(axis, ideal_label, (0.01, c.ideal_hit_ratio), GREY, (2, 4), MIXED_FRAME)
    needed = dict(c.lru_for_share)[0.9]
    target_ratio = 0.9 * c.ideal_hit_ratio
    axis.plot([needed / c.distinct_blocks], [target_ratio], "o", color=BLUE, markersize=4)
    label = f"90 % of it with {size(needed * c.block_bytes)},\n"
    label += f"{percent(needed / c.distinct_blocks, 1)} of the distinct blocks"
    note(axis, label, (0.98, 0.05), BLUE, frame=AXES_FRAME, ha="right")
    axis.set_xscale("log")
    axis.set_xlim(1e-4 if needed / c.distinct_blocks < 0.01 else 1e-3, 1)
    axis.set_ylim(0, max(1.12 * c.ideal_hit_ratio, 0.05))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g} %"))
    percent_axis(axis.yaxis)
    name_axes(axis, "capacity, share of the distinct blocks", "block hit ratio of LRU")
    title(axis, f"LRU has 90 % of the ideal hits with {size(needed * c.block_bytes)}")
    time_s, live_bytes = np.array(c.time_s), np.array(c.live_blocks) * c.block_bytes
    live_axis.plot(time_s, live_bytes, color=GREEN, linewidth=1.8)
    live_axis.fill_between(time_s, live_bytes, color=GREEN, alpha=0.15, linewidth=0)
    live_axis.set_ylim(0, 1.15 * max(live_bytes.max(), 1))
    unit = 1024.0 ** min(4, int(math.log(max(float(live_bytes.max()), 1.0), 1024.0)))
    tick = round_step(float(live_bytes.max()) / unit / 5) * unit
    live_axis.set_yticks(np.arange(0.0, 1.1 * float(live_bytes.max()) + tick, tick))
    live_axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: size(v) if v else "0"))
    clock_axis(live_axis, time_s[0], time_s[-1])
    live_axis.set_ylabel("blocks that will be used again", fontsize=8.5, color=INK)
    title(live_axis, f"With the future known: {size(c.live_peak * c.block_bytes)}")
    return figure
