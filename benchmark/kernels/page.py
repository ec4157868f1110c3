"""Tables of docs/research/kernels.md: compiled facts, and measurements on a GPU.

python -m canopy_kernel.compile --exact --match "d128 bf16 page1" --kernel sparse_prefill \
    --json benchmark/kernels/compiled.json
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def lease() -> Any:
    return load("benchmark/kernels/h100.json")


def facts() -> Any:
    return lease()["parts"]["facts"]["facts"][0]


def cases() -> dict[str, Any]:
    """Number of cases that were compared with their references, and of those within the bounds."""
    found = lease()["correctness"]
    kernels = sorted(name.replace("_", " ") for name in found[0]["errors"])
    return {"ok": sum(c["ok"] for c in found), "of": len(found), "kernels": kernels}


def gpu_attention() -> str:
    """Times of one layer's attention, and the floor that counts each visible pair once."""
    rows = []
    for one in lease()["attention"]:
        ours, masked, dense = (one[f"{way}_s"] for way in ("triton", "masked_sdpa", "dense_sdpa"))
        rows.append(
            [f"{one['tokens']:,}", f"{one['ratio']:.2f}"]
            + [f"{1000 * s:.2f}" for s in (ours, masked, dense)]
            + [f"{dense / ours:.1f}", f"{one['triton_times_floor']:.1f}"]
        )
    head = "tokens|r|Triton, ms|masked SDPA, ms|dense SDPA, ms|dense / Triton|Triton / floor"
    return table(head.split("|"), rows, numbers=True)


def gpu_documents() -> str:
    """The served 8B: first token of fused prompts against SGLang's own prefill."""
    rows = [
        [f"{one['tokens']:,}", f"{one['computed']:,}"]
        + [f"{one[name]:.0f}" for name in ("plain_ms", "fused_ms", "plan_ms")]
        + [f"{one['times']:.2f}"]
        for one in lease()["parts"]["documents_speed"]["documents"]
    ]
    head = "tokens|computed|plain, ms|fused, ms|of it planning, ms|plain / fused"
    return table(head.split("|"), rows, numbers=True)


def transfer() -> Any:
    """The longest transfer of rows from pinned host memory into the paged pool."""
    rows = lease()["parts"]["pinned"]["rope_scatter"]
    return max((r for r in rows if r["rows_in"] == "pinned"), key=lambda r: r["tokens"])


def same() -> Any:
    """Answers of a random 1B under `wa`, hot and after eviction, against cold ones."""
    return lease()["parts"]["same_wa"]["same"][0]


def exact() -> Any:
    return lease()["parts"]["documents_exact"]["exact at ratio 1"][0]


PARTS: dict[str, Callable[[], str]] = {
    "compiled": compiled,
    "gpu-attention": gpu_attention,
    "gpu-documents": gpu_documents,
}
