"""The pictures of this paper's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

QUANTILES = ("p50_ms", "p90_ms", "p95_ms", "p99_ms")


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=80, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def draw_ttft(path: Path, panels: Mapping[str, Sequence[Mapping[str, Any]]], title: str) -> None:
    """P50 to P99 of the TTFT by policy, a panel a threshold, as in the paper's Figures 5 and 7;
    here as shares of the first policy's, whose times stand below."""
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 4.2), sharey=True)
    for axis, (name, rows) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        bar_width = 0.8 / len(rows)
        for i, row in enumerate(rows):
            bar_positions = np.arange(len(QUANTILES)) + (i - (len(rows) - 1) / 2) * bar_width
            shares = [100 * row[q] / rows[0][q] for q in QUANTILES]
            axis.bar(bar_positions, shares, bar_width, label=row["arm"], color=f"C{i}")
        axis.axhline(100, color="black", lw=0.8, ls="--")
        names = [f"{q[:3].upper()}\n{rows[0][q]:,.0f} ms" for q in QUANTILES]
        axis.set_xticks(range(len(QUANTILES)), names)
        axis.set_title(name, fontsize=10)
        axis.grid(axis="y", alpha=0.3)
    np.atleast_1d(axes)[0].set_ylabel("TTFT without queue, % of lru's")
    np.atleast_1d(axes)[0].set_ylim(bottom=0)
    handles, labels = np.atleast_1d(axes)[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.subplots_adjust(bottom=0.22, wspace=0.06, top=0.86)
    save(figure, path)
