"""All shipped kernel specialisations, compiled by :mod:`.compile`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

DIMS = (64, 128, 256)
PAGES = (1, 16, 64)
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
GROUP = 4
"""Query heads per KV head. Only row addresses are divided by it, once per tile."""

KV_HEADS = 8


@dataclass(frozen=True, slots=True)
class Specialisation:
    """A kernel, the types of its pointers and scalars, its constants, warps and stages."""

    name: str
    kernel: Any
    pointers: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int


def specialisations(arch: int) -> Iterator[Specialisation]:
    """Yield all specialisations for one chip (80, 90, 100), which determines their tiles."""
    from canopy_kernel import lowpass

    for kind in DTYPES:
        for dim in DIMS:
            for page in PAGES:
                yield from _attention(kind, dim, page, arch)
                yield from _movers(kind, dim, page)
        for few in (False, True):
            yield from _merges(kind, few, arch)
        yield Specialisation(
            f"energy {kind}",
            lowpass._energy_kernel,
            {"k_ptr": f"*{kind}", "v_ptr": f"*{kind}", "out_ptr": "*fp32"},
            {"WIDTH": 1024, "BLOCK": lowpass.BLOCK, "STEP": lowpass.STEP},
            4,
            2,
        )


def _attention(kind: str, dim: int, page: int, arch: int) -> Iterator[Specialisation]:
    """Yield attention with large and small tiles, whole and split."""
    import torch

    from canopy_kernel import tiles, triton_attention

    dtype = getattr(torch, DTYPES[kind])
    for few, split in ((False, False), (False, True), (True, False), (True, True)):
        config = triton_attention.configuration(dim, dtype, few, arch, split)
        if not few and config.block_m == tiles.FEW:
            continue  # only small tiles exist
        what = ("few_rows" if few else "rows") + ("_split" if split else "")
        yield Specialisation(
            f"sparse_prefill {what} d{dim} {kind} page{page}",
            triton_attention._sparse_prefill_kernel,
            {
                **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{kind}"),
                **dict.fromkeys(("positions_ptr", "slots_ptr"), "*i64"),
                **dict.fromkeys(("query_starts_ptr", "key_starts_ptr", "tiles_ptr"), "*i32"),
                **dict.fromkeys(("part_ptr", "part_lse_ptr"), "*fp32" if split else f"*{kind}"),
                "scale_log2": "fp32",
            },
            {
                "GROUP": GROUP,
                "PAGE": page,
                "DIM": dim,
                "BLOCK_M": config.block_m,
                "BLOCK_K": config.block_k,
                "IEEE": kind == "fp32",
                "WIDE": False,
                "SPLIT": split,
            },
            config.warps,
            config.stages,
        )


def _merges(kind: str, few: bool, arch: int) -> Iterator[Specialisation]:
    import torch

    from canopy_kernel import triton_attention

    for dim in DIMS:
        config = triton_attention.configuration(dim, getattr(torch, DTYPES[kind]), few, arch)
        yield Specialisation(
            f"merge_parts {'few_rows' if few else 'rows'} d{dim} {kind}",
            triton_attention._merge_kernel,
            {
                **dict.fromkeys(("part_ptr", "part_lse_ptr"), "*fp32"),
                **dict.fromkeys(("merges_ptr", "query_starts_ptr"), "*i32"),
                "out_ptr": f"*{kind}",
            },
            {
                "GROUP": GROUP,
                "DIM": dim,
                "BLOCK_M": config.block_m,
                "BLOCK_R": triton_attention.MERGE_ROWS,
            },
            4,
            2,
        )


def _movers(kind: str, dim: int, page: int) -> Iterator[Specialisation]:
    from canopy_kernel import rope_scatter, rows

    label = f"d{dim} {kind} page{page}"
    pointers = {"positions_ptr": "*i64", "slots_ptr": "*i64", "table_ptr": "*fp32"}
    yield Specialisation(
        f"rope_scatter {label}",
        rope_scatter._rope_scatter_kernel,
        {
            **dict.fromkeys(("like_ptr", "pool_ptr"), f"*{kind}"),
            **dict.fromkeys(("pieces_ptr", "source_ptr"), "*i64"),
            **pointers,
        },
        {"HEADS": KV_HEADS, "PAGE": page, "DIM": dim, "BLOCK": rope_scatter.BLOCK},
        rows.warps(dim),
        2,
    )
