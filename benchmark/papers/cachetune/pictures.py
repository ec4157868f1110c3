"""Draw the figures from the JSON results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Rows = dict[str, dict[str, Any]]
LABELS = {
    "frequency": "low frequencies (paper)",
    "frequency-per-layer": "low, a set a layer (eq. 7)",
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
    what = name.rsplit(", ", 1)[0]
    for key, text in LABELS.items():
        if what == key or what.startswith(f"{key} "):
            return text + what[len(key) :]
    return what


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
    """KL of every arm at r = 0.15 with standard errors, by encoding."""
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


def trade_off(path: Path, rows: Rows, data: str) -> None:
    """Figures 7 and 9: KL against the cost of a prefill, and low frequencies by the ratio."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.8), gridspec_kw={"wspace": 0.3})
    shown = [n for n in rows if n.endswith(", bos") and "=" not in n]
    for i, name in enumerate(sorted(shown, key=lambda n: rows[n]["cpu_s"])):
        row = rows[name]
        left.errorbar(
            row["cpu_s"],
            row["kl"],
            yerr=row["kl_se"],
            fmt="o",
            color=f"C{i}",
            capsize=2,
            lw=1,
            label=label(name),
        )
    left.set(xlabel="prefill, CPU seconds", ylabel="KL, nats a token, behind BOS", ylim=(0, None))
    left.legend(fontsize=7, loc="upper left", bbox_to_anchor=(0, -0.18), ncol=2)
    for how, shade in (("bos", PAPER), ("alone", OTHER)):
        points = {0.0: "no recompute", 0.05: "frequency r=0.05", 0.15: "frequency"}
        points[0.25] = "frequency r=0.25"
        chosen = [rows[f"{name}, {how}"] for name in points.values()]
        right.errorbar(
            list(points),
            [row["kl"] for row in chosen],
            yerr=[row["kl_se"] for row in chosen],
            fmt="o-",
            color=shade,
            capsize=2,
            label=TITLES[how],
        )
    right.set(xlabel="share recomputed by low frequencies", ylabel="KL, nats a token")
    right.set_ylim(0, None)
    right.legend(fontsize=7, loc="upper left", bbox_to_anchor=(0, -0.18), ncol=2)
    figure.suptitle(data, fontsize=10)
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


def heat_maps(path: Path, question: Rows) -> None:
    """Figure 3, for one question: full recompute, then low and high frequencies by encoding."""
    shown = {"full": "full recompute"} | {
        f"{name}, {how}": f"{LABELS[name]}, {TITLES[how]}"
        for how in ("bos", "alone")
        for name in ("frequency", "high-frequency")
    }
    figure, axes = plt.subplots(len(shown), 1, figsize=(9, 1.5 * len(shown)), sharex=True)
    top = max(max(row) for row in question["full"]["map"])
    for axis, (name, title) in zip(axes, shown.items()):
        image = axis.imshow(
            question[name]["map"], aspect="auto", vmin=0, vmax=top / 2, cmap="viridis"
        )
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_ylabel("question")
    axes[-1].set_xlabel("position in the documents (96 columns)")
    figure.tight_layout()
    figure.colorbar(image, ax=axes, shrink=0.6, label="share of attention")
    save(figure, path)


def chunk_sizes(path: Path, curves: dict[str, Any], sizes: Sequence[int]) -> None:
    """Figure 4."""
    figure, axes = plt.subplots(1, len(curves), figsize=(3.6 * len(curves), 3.2), sharey=True)
    for axis, (pool, by_ratio) in zip(axes, curves.items()):
        for i, (ratio, by_size) in enumerate(by_ratio.items()):
            axis.plot(
                sizes,
                [by_size[str(size)] for size in sizes],
                "o-",
                color=plt.cm.viridis(i / len(by_ratio)),
                label=f"{100 * float(ratio):.0f} %",
            )
        axis.set(title=pool, xlabel="tokens a chunk", xticks=list(sizes))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("seconds to the first token (CPU)")
    figure.tight_layout()
    axes[-1].legend(title="recomputed", fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, path)


def pools(path: Path, rows: Rows) -> None:
    """Figure 11."""
    figure, axis = plt.subplots(figsize=(7, 3.2))
    names, width = list(rows), 0.27
    for i, (field, text, shade) in enumerate(
        (
            ("full_s", "full recompute", OTHER),
            ("fixed_s", "fixed 15 %", PAPER),
            ("adaptive_s", "searched", OURS),
        )
    ):
        at = [x + (i - 1) * width for x in range(len(names))]
        axis.bar(at, [rows[n][field] for n in names], width, color=shade, label=text)
        if field == "adaptive_s":
            for x, name in zip(at, names):
                axis.annotate(
                    f"{100 * rows[name]['ratio']:.0f} %",
                    (x, rows[name][field]),
                    ha="center",
                    va="bottom",
                    fontsize=8,
                )
    axis.set_xticks(range(len(names)), names)
    axis.set_ylabel("seconds to the first token (CPU)")
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    axis.grid(axis="y", alpha=0.3)
    save(figure, path)


def rates(path: Path, rows: Rows) -> None:
    """Figure 8."""
    figure, axis = plt.subplots(figsize=(7, 3.6))
    for i, (name, row) in enumerate(rows.items()):
        text = "full recompute" if name == "full" else label(name)
        points = row["rate_p50_p90"]
        axis.plot(
            [p[0] for p in points], [p[1] for p in points], "o-", ms=3, color=f"C{i}", label=text
        )
        axis.plot([p[0] for p in points], [p[2] for p in points], "--", lw=0.8, color=f"C{i}")
    axis.set(
        xlabel="requests a second (simulated queue, measured service times)",
        ylabel="TTFT, s: median (solid), P90 (dashed)",
        xscale="log",
        yscale="log",
    )
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, path)
