"""Tables of docs/research/tests.md: surviving mutants by package."""

from __future__ import annotations

from result_tables import load

RESULTS = "benchmark/mutation/results.json"
EQUIVALENT = "benchmark/mutation/equivalent.json"


def packages() -> str:
    """Drawn and surviving mutants of each package."""
    lines = [
        "| package | places | drawn | survived | of these equivalent |",
        "|---|---:|---:|---:|---:|",
    ]
    for package, found in sorted(load(RESULTS).items()):
        drawn, survived = found["mutants"], found["survived"]
        equivalent = len(set(found["survivors"]) & load(EQUIVALENT).keys())
        lines.append(
            f"| `{package}` | {found['sites']:,} | {drawn} "
            f"| {survived} ({100 * survived / drawn:.0f} %) | {equivalent} |"
        )
    return "\n".join(lines)


PARTS = {"packages": packages}
