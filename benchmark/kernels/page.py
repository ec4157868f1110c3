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
    """Registers, shared bytes, programs a multiprocessor, and loads under way in its loops."""
    found = {(b["config"].split()[1], b["arch"]): b for b in load(FILE)}
    lines = []
    for name, title in KERNELS.items():
        cells = []
        for chip in CHIPS:
            b = found[name, chip]
            waits = min(min(w) for w in b["waits"] if w)
            cells.append(f"{b['registers']}, {b['shared_bytes']:,}, {b['programs']}, {waits}")
        lines.append([f"attention, {title}", *cells])
    first = "sm_80: registers, shared bytes, programs a multiprocessor, loads under way"
    return table(["kernel", first, "sm_90", "sm_100"], lines)


PARTS: dict[str, Callable[[], str]] = {"compiled": compiled}
