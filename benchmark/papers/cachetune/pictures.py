"""Draw the figures from the JSON results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Rows = dict[str, dict[str, Any]]
LABELS_BY_SELECTOR = {
    "frequency": "low frequencies (paper)",
    "high-frequency": "high frequencies",
    "hkvd": "CacheBlend",
    "epic": "EPIC, 16 tokens",
    "first-k": "first 15 %",
    "prophetkv": "ProphetKV",
    "question": "question (default here)",
}
OUR_COLOUR, PAPER_COLOUR, OTHER_COLOUR = "#0f766e", "#b45309", "#94a3b8"


def label_of(name: str) -> str:
    """Return an arm's label, without its encoding, which the position in the figure shows."""
    arm = name.rsplit(", ", 1)[0]
    for key, label in LABELS_BY_SELECTOR.items():
        if arm == key or arm.startswith(f"{key} "):
            return label + arm[len(key) :]
    return arm


def colour_of(name: str) -> str:
    if name.startswith("question"):
        return OUR_COLOUR
    return PAPER_COLOUR if "frequency" in name else OTHER_COLOUR


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=90, bbox_inches="tight")
    plt.close(figure)


TITLES_BY_ENCODING = {
    "bos": "each chunk encoded behind BOS",
    "alone": "each chunk encoded behind nothing",
    "prefix": "behind the system text",
}


def draw_selectors(path: Path, rows: Rows, data_set: str) -> None:
    """KL of no recompute and of every arm at r = 0.15, with standard errors, by encoding."""
    arms_by_encoding = {
        encoding: sorted(
            (n for n in rows if n.endswith(f", {encoding}") and " r=" not in n),
            key=lambda n: -rows[n]["kl"],
        )
        for encoding in TITLES_BY_ENCODING
    }
    figure, axes = plt.subplots(
        len(arms_by_encoding),
        1,
        figsize=(7, 1.8 + 0.26 * sum(map(len, arms_by_encoding.values()))),
        gridspec_kw={"height_ratios": [len(s) for s in arms_by_encoding.values()]},
        sharex=True,
    )
    for axis, (encoding, names) in zip(axes, arms_by_encoding.items()):
        axis.barh(
            [label_of(n) for n in names],
            [rows[n]["kl"] for n in names],
            xerr=[rows[n]["kl_se"] for n in names],
            color=[colour_of(n) for n in names],
            error_kw={"lw": 1},
        )
        axis.set_title(TITLES_BY_ENCODING[encoding], fontsize=10, loc="left")
        axis.grid(axis="x", alpha=0.3)
    axes[-1].set_xlabel(f"KL to full recompute, nats a token ({data_set}; lower is better)")
    figure.tight_layout()
    save(figure, path)


def draw_spectrum(path: Path, spectra: dict[str, list[list[float]]]) -> None:
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
