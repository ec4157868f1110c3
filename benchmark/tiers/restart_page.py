"""Renders the result of ``restart.py``, for ``scripts/result_pages.py``."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

RESULT = Path(__file__).resolve().parent / "results" / "restart.json"
NAMES = {
    "drain": "`wa`, drained",
    "bounded": "`wa`, time for a quarter of the device",
    "random": "the same in random order (placebo)",
    "no drain": "`wa`, not drained",
    "lru, file": "`lru` and HiCache `file`",
    "cold": "cold start",
}


def _found(trace: str, arm: str, key: str) -> list[float]:
    rows = json.loads(RESULT.read_text())["rows"]
    return [row[key] for row in rows if row["trace"] == trace and row["arm"] == arm]


def _cell(trace: str, arm: str) -> str:
    before, after = _found(trace, arm, "before"), _found(trace, arm, "after")
    each = ", ".join(f"{100 * value:.1f}" for value in after)
    return f"{100 * mean(before):.1f} | {100 * mean(after):.1f} ({each})"


def table() -> str:
    """Hits before and after a restart, by arm."""
    lines = [
        "| % of prompt tokens hit | conversation: 5 min before | after (each pair) | agents: before | after |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {shown} | {_cell('conversation', arm)} | {_cell('agents', arm)} |"
        for arm, shown in NAMES.items()
    ]
    return "\n".join(lines)


def loading() -> str:
    """What loading to the host after the start changes."""
    parts = []
    for trace in ("conversation", "agents"):
        for arm, shown in (("drain", "without"), ("load", "with"), ("load random", "at random")):
            hits, disk = (100 * mean(_found(trace, arm, key)) for key in ("after", "after, disk"))
            parts.append(f"{trace} {shown}: {hits:.1f} % hit, {disk:.1f} % from disk")
    return "; ".join(parts)


PARTS = {"restart": table, "loading": loading}
