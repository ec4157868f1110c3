"""Axes that all pictures share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = ("#0b5394", "#e07b00", "#38761d", "#a64d79", "#666666", "#00a3a3", "#c00000", "#7f6000")


def new_panels(rows: int, columns: int, width: float = 3.6, height: float = 2.9) -> tuple[Any, Any]:
    """Return a figure and its axes, an array of rows. ``width``, ``height``: of a panel, in inches."""
    plt.rcParams.update({"font.size": 8, "axes.titlesize": 8.5, "legend.fontsize": 7})
    return plt.subplots(
        rows, columns, figsize=(width * columns, height * rows), layout="constrained", squeeze=False
    )


def name_axes(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25)


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=76, pil_kwargs={"optimize": True})
    plt.close(figure)
