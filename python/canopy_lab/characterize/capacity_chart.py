"""The figure of capacity."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from canopy_lab.characterize.capacity import Capacity
from canopy_lab.report.axes import (
    ALONG,
    BLUE,
    GREEN,
    GREY,
    INK,
    WHOLE,
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
    axis, right = axes[0]
    share = np.array(c.lru_blocks) / c.distinct_blocks
    axis.plot(share, c.lru_hit_ratio, color=BLUE, linewidth=1.8)
    axis.axhline(c.ideal_hit_ratio, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)))
    ideal = f"ideal {percent(c.ideal_hit_ratio, 1)}"
    note(axis, ideal, (0.01, c.ideal_hit_ratio), GREY, (2, 4), ALONG)
    need = dict(c.lru_for_share)[0.9]
    at = 0.9 * c.ideal_hit_ratio
    axis.plot([need / c.distinct_blocks], [at], "o", color=BLUE, markersize=4)
    most = f"90 % of it with {size(need * c.block_bytes)},\n"
    most += f"{percent(need / c.distinct_blocks, 1)} of the distinct blocks"
    note(axis, most, (0.98, 0.05), BLUE, frame=WHOLE, ha="right")
    axis.set_xscale("log")
    axis.set_xlim(1e-4 if need / c.distinct_blocks < 0.01 else 1e-3, 1)
    axis.set_ylim(0, max(1.12 * c.ideal_hit_ratio, 0.05))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g} %"))
    percent_axis(axis.yaxis)
    name_axes(axis, "capacity, share of the distinct blocks", "block hit ratio of LRU")
    title(axis, f"LRU has 90 % of the ideal hits with {size(need * c.block_bytes)}")
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
