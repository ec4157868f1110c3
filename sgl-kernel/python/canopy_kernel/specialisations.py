"""All shipped kernel specialisations, compiled by :mod:`.compile`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (1, 16, 64)
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

    for dtype in DTYPES:
        for dim in HEAD_DIMS:
            for page in PAGE_SIZES:
                yield from _attention(dtype, dim, page, arch)
                yield from _rope_scatters(dtype, dim, page)
        for is_small in (False, True):
            yield from _merges(dtype, is_small, arch)
        yield Specialisation(
            f"energy {dtype}",
            lowpass._energy_kernel,
            {"k_ptr": f"*{dtype}", "v_ptr": f"*{dtype}", "out_ptr": "*fp32"},
            {"WIDTH": 1024, "BLOCK": lowpass.BLOCK_ROWS, "STEP": lowpass.STEP_COLUMNS},
            4,
            2,
        )


def _attention(dtype: str, dim: int, page: int, arch: int) -> Iterator[Specialisation]:
    """Yield attention with large and small tiles, whole and split."""
    import torch

    from canopy_kernel import tiles, triton_attention

    torch_dtype = getattr(torch, DTYPES[dtype])
    for is_small, is_split in ((False, False), (False, True), (True, False), (True, True)):
        config = triton_attention.configuration(dim, torch_dtype, is_small, arch, is_split)
        if not is_small and config.block_m == tiles.SMALL_TILE_ROWS:
            continue  # only small tiles exist
        variant = ("few_rows" if is_small else "rows") + ("_split" if is_split else "")
        yield Specialisation(
            f"sparse_prefill {variant} d{dim} {dtype} page{page}",
            triton_attention._sparse_prefill_kernel,
            {
                **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}"),
                **dict.fromkeys(("positions_ptr", "slots_ptr"), "*i64"),
                **dict.fromkeys(("query_starts_ptr", "key_starts_ptr", "tiles_ptr"), "*i32"),
                **dict.fromkeys(("part_ptr", "part_lse_ptr"), "*fp32" if is_split else f"*{dtype}"),
                "scale_log2": "fp32",
            },
            {
                "GROUP": GROUP,
                "PAGE": page,
                "DIM": dim,
                "BLOCK_M": config.block_m,
                "BLOCK_K": config.block_k,
                "IEEE": dtype == "fp32",
                "WIDE": False,
                "SPLIT": is_split,
            },
            config.warps,
            config.stages,
        )


def _merges(dtype: str, is_small: bool, arch: int) -> Iterator[Specialisation]:
    import torch

    from canopy_kernel import triton_attention

    for dim in HEAD_DIMS:
        config = triton_attention.configuration(dim, getattr(torch, DTYPES[dtype]), is_small, arch)
        yield Specialisation(
            f"merge_parts {'few_rows' if is_small else 'rows'} d{dim} {dtype}",
            triton_attention._merge_kernel,
            {
                **dict.fromkeys(("part_ptr", "part_lse_ptr"), "*fp32"),
                **dict.fromkeys(("merges_ptr", "query_starts_ptr"), "*i32"),
                "out_ptr": f"*{dtype}",
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


def _rope_scatters(dtype: str, dim: int, page: int) -> Iterator[Specialisation]:
    from canopy_kernel import rope_scatter, rows

    label = f"d{dim} {dtype} page{page}"
    pointers = {"positions_ptr": "*i64", "slots_ptr": "*i64", "table_ptr": "*fp32"}
    yield Specialisation(
        f"rope_scatter {label}",
        rope_scatter._rope_scatter_kernel,
        {
            **dict.fromkeys(("row_type_ptr", "pool_ptr"), f"*{dtype}"),
            **dict.fromkeys(("transfers_ptr", "source_ptr"), "*i64"),
            **pointers,
        },
        {"HEADS": KV_HEADS, "PAGE": page, "DIM": dim, "BLOCK": rope_scatter.BLOCK_TOKENS},
        rows.warps_per_program(dim),
        2,
    )
