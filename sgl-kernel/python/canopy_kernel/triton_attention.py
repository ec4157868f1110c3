"""Position-causal sparse attention in Triton, over a work list of tiles.

The query heads of a KV head are rows of one tile (:mod:`.tiles`), which reads keys up to its last
position. Keys before its first position are read in a loop without a mask. A tile with few rows is split
along its keys, and its parts are merged by their log-sum-exp.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from canopy_kernel import tiles
from canopy_kernel.ragged import Rows
from canopy_kernel.triton_shim import tl, triton

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Rows and keys per tile, warps, pipeline stages, and concurrent programs per multiprocessor, as
    limited by the compiled kernel's registers and shared memory."""

    block_m: int
    block_k: int
    warps: int
    stages: int
    programs: int = 1


PIPELINE_STAGES = 5
"""For 16-bit types. A key's slot is loaded before the key: with fewer than 5 stages the
loops over keys wait for every load (``async_wait`` of 0); with 5, four loads remain pending."""


def configuration(
    dim: int, dtype: torch.dtype, is_small: bool, capability: int, is_split: bool = False
) -> TileSizes:
    """Return the shipped configuration for a head size, a type, a small or large tile and a chip (80, 90, 100).

    At head size 128, with 64 rows on 8 warps, both halves of the warps would compute the same scores; a
    tile of 128 rows has one warp per 16 rows. All configurations compile without spills
    (:mod:`.compile`); their speed needs a GPU to measure.
    """
    if dtype == torch.float32:
        if is_small:
            return TileSizes(tiles.SMALL_TILE_ROWS, 32 if dim < 256 else 16, 4, 1)
        block_m, block_k, warps = {64: (32, 32, 4), 128: (16, 32, 8)}.get(dim, (16, 16, 4))
        return TileSizes(block_m, block_k, warps, 1)
    stages = PIPELINE_STAGES if capability < 100 else 2 if dim == 256 and not is_small else 3
    if is_small:
        programs = {64: 5 if capability >= 100 else 4, 128: 3 if capability >= 90 else 2}.get(
            dim, 2
        )
        return TileSizes(tiles.SMALL_TILE_ROWS, 64 if dim < 256 else 32, 4, stages, programs)
    if dim == 64:
        # On Blackwell, whole prompts of pages spill with 64 keys per tile; with 32, two programs fit.
        keys = 32 if capability >= 100 and not is_split else 64
        return TileSizes(128, keys, 8, stages, 2 if capability >= 90 else 1)
    if dim == 256 and capability < 90:
        return TileSizes(32, 32, 4, stages)
    return TileSizes(128, 64 if dim == 128 and capability >= 90 else 32, 8, stages)


@triton.jit
def _dot(a, b, IEEE: tl.constexpr):
    return tl.dot(a, b, input_precision="ieee" if IEEE else "tf32")


@triton.jit
def _slot_offset(slot, page_stride, token_stride, PAGE: tl.constexpr):
    """Return the offset of a slot's row in a pool."""
    if PAGE == 1:
        offset = slot * page_stride
    else:
        offset = (slot // PAGE) * page_stride + (slot % PAGE) * token_stride
    return offset


@triton.jit
def _add_keys(
    q,
    acc,
    peak,
    total,
    first_key,
    end,
    position,
    k_head_ptr,
    v_head_ptr,
    slots_ptr,
    scale_log2,
    k_page,
    k_token,
    v_page,
    v_token,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IEEE: tl.constexpr,
    WEIGHT_TYPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold the ``BLOCK_K`` keys from ``first_key`` into the running softmax of the rows."""
    dims = tl.arange(0, DIM)
    key = first_key + tl.arange(0, BLOCK_K)
    if MASKED:
        key_mask = key < end
        slot = tl.load(slots_ptr + key, mask=key_mask, other=0).to(tl.int64)
        k_pointers = k_head_ptr + _slot_offset(slot, k_page, k_token, PAGE)[None, :] + dims[:, None]
        k = tl.load(k_pointers, mask=key_mask[None, :], other=0.0).to(q.dtype)
        score = _dot(q, k, IEEE) * scale_log2
        visible = (key[None, :] <= position[:, None]) & key_mask[None, :]
        score = tl.where(visible, score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, axis=1))
        # A row that has seen no key yet keeps a finite peak, so that exp2 gives 0 and not NaN.
        finite_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    else:
        slot = tl.load(slots_ptr + key).to(tl.int64)
        k_pointers = k_head_ptr + _slot_offset(slot, k_page, k_token, PAGE)[None, :] + dims[:, None]
        k = tl.load(k_pointers).to(q.dtype)
        score = _dot(q, k, IEEE) * scale_log2
        new_peak = tl.maximum(peak, tl.max(score, axis=1))
        finite_peak = new_peak
    weight = tl.exp2(score - finite_peak[:, None])
    decay = tl.exp2(peak - finite_peak)
    total = total * decay + tl.sum(weight, axis=1)
    v_pointers = v_head_ptr + _slot_offset(slot, v_page, v_token, PAGE)[:, None] + dims[None, :]
    if MASKED:
        v = tl.load(v_pointers, mask=key_mask[:, None], other=0.0).to(q.dtype)
    else:
        v = tl.load(v_pointers).to(q.dtype)
    acc = acc * decay[:, None] + _dot(weight.to(WEIGHT_TYPE).to(q.dtype), v, IEEE)
    return acc, new_peak, total


@triton.jit
def _sparse_prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    positions_ptr,
    query_starts_ptr,
    slots_ptr,
    key_starts_ptr,
    tiles_ptr,
    part_ptr,
    part_lse_ptr,
    scale_log2,
    q_row,
    q_head,
    k_page,
    k_token,
    k_head,
    v_page,
    v_token,
    v_head,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IEEE: tl.constexpr,
    WIDE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    kv_head = tl.program_id(0)
    tile = tiles_ptr + tl.program_id(1) * 8
    request = tl.load(tile)
    first_row = tl.load(tile + 1)
    lane = tl.arange(0, BLOCK_M)
    row_mask = lane < tl.load(tile + 2)
    dims = tl.arange(0, DIM)
    row = first_row + lane
    query = tl.load(query_starts_ptr + request) + row // GROUP
    head = kv_head * GROUP + row % GROUP
    position = tl.load(positions_ptr + query, mask=row_mask, other=-1).to(tl.int32)
    query_offset = query.to(tl.int64) * q_row + head * q_head
    q = tl.load(q_ptr + query_offset[:, None] + dims[None, :], mask=row_mask[:, None], other=0.0)
    weight_type: tl.constexpr = q_ptr.dtype.element_ty
    if WIDE:  # Triton's interpreter multiplies the raw bits of bf16: widen there, exactly
        q = q.to(tl.float32)
    slots = slots_ptr + tl.load(key_starts_ptr + request)
    # Sorted positions: the tile's last live row bounds the keys anyone in it may read, and every
    # row sees the keys up to its first one.
    stop = tl.max(position, axis=0) + 1
    unmasked_end = tl.min(tl.where(row_mask, position, stop), axis=0) + 1
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    start = stop * 0
    end = stop
    if SPLIT:
        part = tl.load(tile + 4)
        parts = tl.load(tile + 5)
        part_keys = tl.cdiv(tl.cdiv(stop, parts), BLOCK_K) * BLOCK_K
        start = part * part_keys
        end = tl.minimum(start + part_keys, stop)
    unmasked = tl.maximum(tl.minimum(end, unmasked_end) - start, 0) // BLOCK_K * BLOCK_K
    k_head_ptr = k_ptr + kv_head * k_head
    v_head_ptr = v_ptr + kv_head * v_head
    for first_key in range(start, start + unmasked, BLOCK_K):
        acc, peak, total = _add_keys(
            q,
            acc,
            peak,
            total,
            first_key,
            end,
            position,
            k_head_ptr,
            v_head_ptr,
            slots,
            scale_log2,
            k_page,
            k_token,
            v_page,
            v_token,
            PAGE,
            DIM,
            BLOCK_K,
            IEEE,
            weight_type,
            False,
        )
    for first_key in range(start + unmasked, end, BLOCK_K):
        acc, peak, total = _add_keys(
            q,
            acc,
            peak,
            total,
            first_key,
            end,
            position,
            k_head_ptr,
            v_head_ptr,
            slots,
            scale_log2,
            k_page,
            k_token,
            v_page,
            v_token,
            PAGE,
            DIM,
            BLOCK_K,
            IEEE,
            weight_type,
            True,
        )
    total = tl.where(total == 0.0, 1.0, total)  # no key in this part
    acc = acc / total[:, None]
    is_whole = True
    if SPLIT:  # noqa: SIM102 - the first is decided when the kernel is compiled
        if tl.load(tile + 5) > 1:
            place = (tl.load(tile + 6).to(tl.int64) * tl.num_programs(0) + kv_head) * BLOCK_M + lane
            tl.store(part_ptr + place[:, None] * DIM + dims[None, :], acc)
            tl.store(part_lse_ptr + place, peak + tl.log2(total))
            is_whole = False
    if is_whole:
        tl.store(
            out_ptr + query_offset[:, None] + dims[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=row_mask[:, None],
        )


@triton.jit
def _merge_kernel(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    merges_ptr,
    query_starts_ptr,
    q_row,
    q_head,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Join a split tile's parts: weights are exp2 of each part's log-sum-exp less the greatest."""
    kv_head = tl.program_id(0)
    merge = merges_ptr + tl.program_id(1) * 8
    lane = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_mask = lane < tl.load(merge + 2)
    dims = tl.arange(0, DIM)
    first_part = tl.load(merge + 3).to(tl.int64)
    peak = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, DIM], tl.float32)
    for part in range(tl.load(merge + 4)):
        place = ((first_part + part) * tl.num_programs(0) + kv_head) * BLOCK_M + lane
        lse = tl.load(part_lse_ptr + place, mask=row_mask, other=float("-inf"))
        part_rows = tl.load(part_ptr + place[:, None] * DIM + dims[None, :], mask=row_mask[:, None])
        new_peak = tl.maximum(peak, lse)
        finite_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay = tl.exp2(peak - finite_peak)
        weight = tl.exp2(lse - finite_peak)
        total = total * decay + weight
        acc = acc * decay[:, None] + part_rows * weight[:, None]
        peak = new_peak
    row = tl.load(merge + 1) + lane
    query = (tl.load(query_starts_ptr + tl.load(merge)) + row // GROUP).to(tl.int64)
    query_offset = query * q_row + (kv_head * GROUP + row % GROUP) * q_head
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out_ptr + query_offset[:, None] + dims[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=row_mask[:, None],
    )


MERGE_ROWS = 16
"""Rows per program of the merge."""


@functools.lru_cache(maxsize=16)
def read_chip(device: torch.device) -> tuple[int, int]:
    """Return a device's compute capability (80, 90, ..) and number of multiprocessors."""
    if device.type != "cuda":
        return 90, 16  # the interpreter
    properties = torch.cuda.get_device_properties(device)
    return properties.major * 10 + properties.minor, properties.multi_processor_count


def _copy_to(device: torch.device, launches: list[tiles.Launch]) -> list[tiles.Launch]:
    """Copy the tables to the device asynchronously."""
    if device.type != "cuda":
        return launches

    def copy(table: torch.Tensor) -> torch.Tensor:
        return table.pin_memory().to(device, non_blocking=True) if len(table) else table

    return [tiles.Launch(x.block_m, copy(x.tiles), copy(x.merges), x.parts) for x in launches]


def sparse_prefill_triton(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, rows: Rows, scale: float
) -> torch.Tensor:
    """Run the Triton kernel (CUDA, or the interpreter on a CPU). Arguments as
    :func:`canopy_kernel.attention.reference`; the work list is computed once for all layers."""
    q = q.contiguous()
    out = torch.empty_like(q)
    if q.shape[0] == 0:
        return out
    kv_heads = k_pool.shape[2]
    group, dim = q.shape[1] // kv_heads, q.shape[2]
    capability, multiprocessors = read_chip(q.device)
    large, small = (
        configuration(dim, q.dtype, is_small, capability, is_split=True)
        for is_small in (False, True)
    )
    block_m = large.block_m
    programs = {x.block_m: x.programs * multiprocessors for x in (small, large)}

    def make_launches() -> list[tiles.Launch]:
        return _copy_to(
            q.device, tiles.plan_launches(*rows.host_counts(), group, block_m, kv_heads, programs)
        )

    for launch in rows.compute_once(("tiles", group, block_m, kv_heads), make_launches):
        run_tiles(q, k_pool, v_pool, out, rows, scale, launch)
    return out


def run_tiles(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    out: torch.Tensor,
    rows: Rows,
    scale: float,
    launch: tiles.Launch,
) -> None:
    """Run one launch into ``out``, and its merge."""
    kv_heads = k_pool.shape[2]
    dim, group = q.shape[2], q.shape[1] // kv_heads
    is_small = launch.block_m == tiles.SMALL_TILE_ROWS
    config = configuration(dim, q.dtype, is_small, read_chip(q.device)[0], launch.parts > 0)
    is_widened = q.dtype == torch.bfloat16 and not q.is_cuda
    shape = (launch.parts, kv_heads, launch.block_m)
    part = torch.empty(*shape, dim, dtype=torch.float32, device=q.device) if launch.parts else out
    part_lse = torch.empty(shape, dtype=torch.float32, device=q.device) if launch.parts else out
    _sparse_prefill_kernel[(kv_heads, len(launch.tiles))](
        q,
        k_pool,
        v_pool,
        out,
        rows.positions,
        rows.query_starts,
        rows.slots,
        rows.key_starts,
        launch.tiles,
        part,
        part_lse,
        scale * LOG2_E,
        *q.stride()[:2],
        *k_pool.stride()[:3],
        *v_pool.stride()[:3],
        GROUP=group,
        PAGE=k_pool.shape[1],
        DIM=dim,
        BLOCK_M=launch.block_m,
        BLOCK_K=config.block_k,
        IEEE=q.dtype == torch.float32 or is_widened,
        WIDE=is_widened,
        SPLIT=launch.parts > 0,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    if launch.parts:
        blocks = triton.cdiv(launch.block_m, MERGE_ROWS)
        _merge_kernel[(kv_heads, len(launch.merges), blocks)](
            part,
            part_lse,
            out,
            launch.merges,
            rows.query_starts,
            *out.stride()[:2],
            GROUP=group,
            DIM=dim,
            BLOCK_M=launch.block_m,
            BLOCK_R=MERGE_ROWS,
            num_warps=4,
        )
