"""What docs/guide/prefix-breaks.md says of the seeded judge: ``breaks.py``."""

from __future__ import annotations

from typing import Any

from result_tables import load

RESULTS = "benchmark/advise/results/breaks.json"
UNNAMED = "benchmark/advise/results/breaks_unnamed.json"
ROWS = (("kinds the finder was made with", "made_with"), ("other kinds", "unseen"))


def _seeds(found: dict[str, Any]) -> str:
    return f"{found['runs']} runs, seeds {found['first_seed']} to {found['first_seed'] + found['seeds'] - 1}, {found['sessions']} sessions"


def logs() -> str:
    """The logs."""
    return f"`python benchmark/advise/breaks.py`: {_seeds(load(RESULTS))}"


def table() -> str:
    """A row for each set of kinds, with and without names of conversations."""
    lines = [
        "| breaks | logs | worth | recall | precision | said/lost |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for path, named in ((RESULTS, ""), (UNNAMED, ", conversations unnamed")):
        for label, key in ROWS:
            one = load(path)["sets"][key]["total"]
            lines.append(
                f"| {label}{named} | {one['logs']} | {one['worth']} | {one['recall']:.2f} | "
                f"{one['precision']:.2f} | {one['said_of_lost']:.2f} |"
            )
    return "\n".join(lines)


def clean() -> str:
    """Findings in logs without a break."""
    found = [load(path)["clean"] for path in (RESULTS, UNNAMED)]
    return f"{sum(f['findings'] for f in found)} findings in {sum(f['requests'] for f in found):,} requests"


def speed() -> str:
    """Requests a second of CPU time."""
    total = load(RESULTS)["sets"]["made_with"]["total"]
    return f"{total['requests_per_cpu_s']:,.0f} requests a second of CPU time, reading included."


PARTS = {"logs": logs, "table": table, "clean": clean, "speed": speed}
