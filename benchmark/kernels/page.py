"""The table of compiled facts in docs/research/kernels.md, out of what the compiler said.

python -m canopy_kernel.compile --exact --match "d128 bf16 page1" --kernel sparse_prefill \
    --json benchmark/kernels/compiled.json
"""

from __future__ import annotations

from collections.abc import Callable

from result_tables import load, table

FILE = "benchmark/kernels/compiled.json"
KERNELS = {
    "rows": "whole tiles",
    "rows_split": "split tiles",
    "rows_continued": "after a stock kernel",
    "few_rows": "few rows",
    "few_rows_split": "few rows, split",
}
CHIPS = (80, 90, 100)


def compiled() -> str:
    """Loads under way in its loops; the result file has the rest."""
    found = {(b["config"].split()[1], b["arch"]): b for b in load(FILE)}
    lines = []
    for name, title in KERNELS.items():
        cells = []
        for chip in CHIPS:
            b = found[name, chip]
            cells.append(str(min(min(w) for w in b["waits"] if w)))
        lines.append([title, *cells])
    return table(["loads under way", *(f"sm_{chip}" for chip in CHIPS)], lines, numbers=True)


PARTS: dict[str, Callable[[], str]] = {"compiled": compiled}
