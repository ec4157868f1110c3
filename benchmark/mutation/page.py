"""Tables of docs/research/tests.md: surviving mutants by package."""

from __future__ import annotations

from result_tables import load

RESULTS = "benchmark/mutation/results.json"


def packages() -> str:
    """Drawn and surviving mutants of each package."""
    lines = ["| package | places that can be broken | drawn | survived |", "|---|---:|---:|---:|"]
    for package, found in sorted(load(RESULTS).items()):
        share = found["survived"] / found["mutants"]
        lines.append(
            f"| `{package}` | {found['sites']:,} | {found['mutants']} "
            f"| {found['survived']} ({100 * share:.0f} %) |"
        )
    return "\n".join(lines)


PARTS = {"packages": packages}
