"""Draw the figures from the JSON results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Rows = dict[str, dict[str, Any]]
LABELS = {
    "frequency": "low frequencies (paper)",
    "high-frequency": "high frequencies",
    "hkvd": "CacheBlend",
    "epic": "EPIC, 16 tokens",
    "first-k": "first 15 %",
    "prophetkv": "ProphetKV",
    "question": "question (default here)",
}
OURS, PAPER, OTHER = "#0f766e", "#b45309", "#94a3b8"


def label(name: str) -> str:
    """Return an arm's label, without its encoding, which the position in the figure shows."""
    kind = name.rsplit(", ", 1)[0]
    for key, text in LABELS.items():
        if kind == key or kind.startswith(f"{key} "):
            return text + kind[len(key) :]
    return kind


def colour(name: str) -> str:
    if name.startswith("question"):
        return OURS
    return PAPER if "frequency" in name else OTHER


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=90, bbox_inches="tight")
    plt.close(figure)


TITLES = {
    "bos": "each chunk encoded behind BOS",
    "alone": "each chunk encoded behind nothing",
    "prefix": "behind the system text",
}


def selectors(path: Path, rows: Rows, data: str) -> None:
    """KL of no recompute and of every arm at r = 0.15, with standard errors, by encoding."""
    sides = {
        how: sorted(
            (n for n in rows if n.endswith(f", {how}") and " r=" not in n),
            key=lambda n: -rows[n]["kl"],
        )
        for how in TITLES
    }
    figure, axes = plt.subplots(
        len(sides),
        1,
        figsize=(7, 1.8 + 0.26 * sum(map(len, sides.values()))),
        gridspec_kw={"height_ratios": [len(s) for s in sides.values()]},
        sharex=True,
    )
    for axis, (how, names) in zip(axes, sides.items()):
        axis.barh(
            [label(n) for n in names],
            [rows[n]["kl"] for n in names],
            xerr=[rows[n]["kl_se"] for n in names],
            color=[colour(n) for n in names],
            error_kw={"lw": 1},
        )
        axis.set_title(TITLES[how], fontsize=10, loc="left")
        axis.grid(axis="x", alpha=0.3)
    axes[-1].set_xlabel(f"KL to full recompute, nats a token ({data}; lower is better)")
    figure.tight_layout()
    save(figure, path)


def spectrum(path: Path, spectra: dict[str, list[list[float]]]) -> None:
    """Figure 2."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for axis, (data, rows) in zip(axes, spectra.items()):
        names = ("K", "V", "K without its mean", "V without its mean")
        for row, name, style in zip(rows, names, ("C0-", "C1-", "C0--", "C1--")):
            axis.plot([5 * i + 2.5 for i in range(len(row))], row, style, label=name)
        axis.axvspan(0, 20, color="k", alpha=0.06)
        axis.set(title=data, xlabel="frequency, % of the spectrum", yscale="log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of the energy")
    axes[1].legend(fontsize=8)
    figure.tight_layout()
    save(figure, path)
