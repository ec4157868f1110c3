"""Renders the result of ``restart.py``, for ``scripts/result_pages.py``."""

from __future__ import annotations

from statistics import mean

from result_tables import load

RESULTS = "benchmark/tiers/results/restart.json"
NAMES = {
    "drain": "`wa`, drained",
    "quarter": "`wa`, time for a quarter of the device",
    "random": "as many blocks in random order (placebo)",
    "no drain": "`wa`, not drained",
    "lru, file": "`lru` and `file`, `write_through`",
    "cold": "cold start",
}
SERVED = "benchmark/tiers/results/restart_served.json"
SERVED_NAMES = {**NAMES, "drain": "`wa`, `--canopy-drain-s 25`"}
TIERS = ("device", "host", "storage")
TRACES = ("conversation", "agents")
TOO_SMALL = ("agents", 0.1)
"""A request of one overlay does not fit on this device, which no server could serve."""


def _hits(arm: str, trace: str, device: float, key: str) -> list[float]:
    asked = {"arm": arm, "trace": trace, "device": device}
    rows = load(RESULTS)["rows"]
    return [100 * row[key] for row in rows if asked.items() <= row.items()]


def _cell(arm: str, trace: str, device: float) -> str:
    before, after = (_hits(arm, trace, device, key) for key in ("before", "after"))
    if (trace, device) == TOO_SMALL:
        return " | "
    each = ", ".join(f"{value:.1f}" for value in after)
    return f"{mean(before):.1f} | {mean(after):.1f} ({each})"


def table() -> str:
    """Hits before and after a restart, by arm and size of the device."""
    devices = sorted({row["device"] for row in load(RESULTS)["rows"]})
    head = " | ".join(f"{trace}: before | after" for trace in TRACES)
    lines = [f"| device, server | {head} |", "|---|" + "---:|" * 2 * len(TRACES)]
    for device in devices:
        for arm, shown in NAMES.items():
            cells = " | ".join(_cell(arm, trace, device) for trace in TRACES)
            lines.append(f"| {100 * device:.0f} %, {shown} | {cells} |")
    return "\n".join(lines)


def served() -> str:
    """Hits of real servers in the window before and after each restart."""
    rows = load(SERVED)["rows"]
    lines = [
        "| trace, server | before, after 1 | before, after 2 | before, after 3 |",
        "|---|" + "---:|" * 3,
    ]
    for trace, arm in dict.fromkeys((row["trace"], row["arm"]) for row in rows):
        hits = {
            row["window"]: f"{100 * sum(row[tier] for tier in TIERS) / row['tokens']:.1f}"
            for row in rows
            if (row["trace"], row["arm"]) == (trace, arm)
        }
        before = {n: hits.get(n, "-") if arm != "cold" else "-" for n in range(3)}
        cells = [f"{before[n]}, {hits.get(n + 1, '-')}" for n in range(3)]
        lines.append(f"| {trace}: {SERVED_NAMES[arm]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


PARTS = {"restart": table, "served": served}
