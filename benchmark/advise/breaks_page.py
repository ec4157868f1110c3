"""Parts of docs/guide/prefix-breaks.md from the results of the seeded judge, ``breaks.py``."""

from __future__ import annotations

from typing import Any

from result_tables import load

RESULTS = "benchmark/advise/results/breaks.json"
INDEPENDENT = "benchmark/advise/results/breaks_independent.json"
MENDED = "benchmark/advise/results/breaks_independent_mended.json"
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
    shown = [
        (load(path)["sets"][key]["total"], f"{label}{named}")
        for path, named in ((RESULTS, ""), (UNNAMED, ", conversations unnamed"))
        for label, key in ROWS
    ]
    for path, when in ((INDEPENDENT, "first run"), (MENDED, "after two mends")):
        other = load(path)
        of = f"seed {other['first_seed']}, {other['sessions']} sessions"
        label = f"kinds of another author, {when}, {of}"
        shown.append((other["sets"]["independent"]["total"], label))
    for one, label in shown:
        lines.append(
            f"| {label} | {one['logs']} | {one['worth']} | {one['recall']:.2f} | "
            f"{one['precision']:.2f} | {one['said_of_lost']:.2f} |"
        )
    return "\n".join(lines)


def unnamed_kinds() -> str:
    """Kinds of the other author that are found at the right place under another name, or not at all."""
    found = load(MENDED)["sets"]["independent"]
    placed = found["total"]["placed"]
    weak = [name for name, one in found["kinds"].items() if one["worth"] and one["recall"] < 0.5]
    return f"{100 * placed:.0f} % are placed right; those named wrongly are {', '.join(weak)}"


def clean() -> str:
    """Findings in logs without a break."""
    found = [load(path)["clean"] for path in (RESULTS, UNNAMED)]
    return f"{sum(f['findings'] for f in found)} findings in {sum(f['requests'] for f in found):,} requests"


def speed() -> str:
    """Requests a second of CPU time."""
    total = load(RESULTS)["sets"]["made_with"]["total"]
    return f"{total['requests_per_cpu_s']:,.0f} requests a second of CPU time, reading included."


PARTS = {
    "logs": logs,
    "table": table,
    "clean": clean,
    "speed": speed,
    "unnamed-kinds": unnamed_kinds,
}
