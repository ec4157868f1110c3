"""Table of benchmark/security/README.md: the runs of the hostile soak, and its verdict."""

from __future__ import annotations

from functools import partial

from result_tables import load

RESULTS = "benchmark/security/results"


def soak(file: str) -> str:
    """Hits of the honest tenant, and what Canopy takes of the scheduler's thread, of each run."""
    found = load(f"{RESULTS}/{file}")
    lines = [
        "| second tenant | steps | tokens hit | hooks | Canopy's tree | encoding | longest call |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, run in found["runs"].items():
        shares = (run[key] for key in ("hit_rate", "hooks_share", "tree_share", "computed_share"))
        cells = [f"{run['steps']:,}", *(f"{100 * share:.2f} %" for share in shares)]
        lines.append(f"| {name} | {' | '.join(cells)} | {1000 * run['longest_s']:.1f} ms |")
    missed = [claim for claim, holds in found["verdict"].items() if not holds]
    verdict = f"Not met: {'; '.join(missed)}." if missed else "All points of the verdict are met."
    return "\n".join([*lines, "", verdict])


PARTS = {"soak": partial(soak, "soak.json"), "smollm2": partial(soak, "soak_smollm2.json")}
