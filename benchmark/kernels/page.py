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


def gpu() -> str:
    found = lease()
    cases, facts = found["correctness"], found["parts"]["facts"]["facts"][0]
    kernels = sorted(name.replace("_", " ") for name in cases[0]["errors"])
    return (
        f"{found['date']}, one {found['device']}, torch {found['torch']}, Triton {facts['triton']}: "
        f"{sum(c['ok'] for c in cases)} of {len(cases)} cases of {', '.join(kernels)} are within "
        "the bounds of their references"
    )


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


def gpu_transfer() -> str:
    """Rows from pinned host memory into the paged pool, against the copy alone."""
    parts = lease()["parts"]
    one = max(
        (r for r in parts["pinned"]["rope_scatter"] if r["rows_in"] == "pinned"),
        key=lambda r: r["tokens"],
    )
    copy = parts["facts"]["facts"][0]["pinned_gb_s"]
    return f"{one['gb_s']:.0f} of the {copy:.0f} GB/s that a copy from pinned memory reaches"


def gpu_same() -> str:
    """Answers of a random 1B under `wa`, hot and after eviction, against cold ones."""
    parts = lease()["parts"]
    same, exact = parts["same_wa"]["same"][0], parts["documents_exact"]["exact at ratio 1"][0]
    return (
        f"the first token of {same['hot']['first']} (found in the cache) and of "
        f"{same['after_eviction']['first']} (after evictions) of {same['of']} prompts, and all 24 "
        f"tokens of {same['hot']['all']} and {same['after_eviction']['all']}, equal the cold "
        f"answer. With documents at ratio 1, {exact['equal']} of {exact['of']} answers of 8 tokens "
        f"equal plain serving (largest difference of a log-probability "
        f"{exact['largest_logprob_difference']:.2f})"
    )


PARTS: dict[str, Callable[[], str]] = {
    "compiled": compiled,
    "gpu": gpu,
    "gpu-attention": gpu_attention,
    "gpu-documents": gpu_documents,
    "gpu-transfer": gpu_transfer,
    "gpu-same": gpu_same,
}
