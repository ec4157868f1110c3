"""The same sparse prefill through FlashInfer, in two ways: the second and the third opinion.

``positions``: FlashInfer's customised attention, compiled by its own JIT (it needs nvcc), whose
mask hook compares a key with its query's true position: no mask tensor. ``mask``: its stock
kernel with a custom mask of queries x keys bits, which needs no compiler.
FlashInfer visits every key of a request for every query tile; the Triton kernel stops at the
tile's last position, so it is the one that ships. Neither of the two has been run on a GPU yet;
the generated source is compiled for sm_80 and sm_90 where nvcc is present (test/kernels).
"""

from __future__ import annotations

import functools
import shutil
from typing import Any

import torch

from canopy_kernel.attention import Rows

VARIANT_NAME = "CanopyPositionCausal"
VARIANT = r"""
struct CanopyPositionCausal : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  uint32_t qo_len, kv_len, window_left;
  int32_t first_row;
  float sm_scale_log2;

  template <typename Params>
  __device__ __host__ CanopyPositionCausal(const Params& params, uint32_t batch_idx, uint8_t*) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;  // no window: no key tile is skipped
    first_row = params.q_indptr[batch_idx];
    sm_scale_log2 = params.sm_scale * math::log2e;
  }

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    // Padding lanes of the last tile ask too: keep their load inside the request.
    const uint32_t row = qo_idx < qo_len ? qo_idx : qo_len - 1;
    return int32_t(kv_idx) <= params.query_positions[first_row + row];
  })
};
"""


def jit_arguments(dim: int, dtype: torch.dtype) -> list[Any]:
    """What FlashInfer's ``gen_customize_batch_prefill_module`` takes after its backend."""
    kind = str(dtype).removeprefix("torch.")
    return [
        f"canopy_position_causal_{kind}_d{dim}",
        dtype,
        dtype,
        dtype,
        torch.int32,
        dim,
        dim,
        ["query_positions"],
        ["int32_t"],
        ["sm_scale"],
        ["double"],
        VARIANT_NAME,
        VARIANT,
    ]


def unavailable(k_pool: torch.Tensor | None = None, how: str = "mask") -> str | None:
    """Why FlashInfer cannot be used here (``how``: ``positions`` or ``mask``), or None."""
    if not torch.cuda.is_available():
        return "FlashInfer needs CUDA"
    try:
        import flashinfer  # noqa: F401
    except ImportError as error:
        return f"flashinfer-python is not importable: {error}"
    if how == "positions" and shutil.which("nvcc") is None:
        return "the customised attention is compiled with nvcc, which is not on the path"
    if k_pool is not None and not k_pool.is_contiguous():
        return "only NHD pools are passed to FlashInfer (token by token, as pages of one)"
    return None


def position_mask(rows: Rows) -> torch.Tensor:
    """All requests' ``[queries x keys]`` masks, flattened one after the other (True = visible)."""
    parts = []
    for qs, ks in rows.requests():
        keys = torch.arange(ks.stop - ks.start, device=rows.positions.device)
        parts.append((keys <= rows.positions[qs, None]).flatten())
    return torch.cat(parts)


def sparse_prefill_flashinfer(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    rows: Rows,
    scale: float,
    how: str = "positions",
) -> torch.Tensor:
    """Arguments as :func:`canopy_kernel.attention.reference`. Raises RuntimeError with the reason
    where FlashInfer cannot run."""
    reason = unavailable(k_pool, how)
    if reason:
        raise RuntimeError(reason)
    heads, dim = q.shape[1:]
    kv_heads = k_pool.shape[2]
    pools = tuple(p.reshape(-1, 1, kv_heads, dim) for p in (k_pool, v_pool))
    wrapper = _wrapper(q.device, dim, q.dtype, how)
    wrapper.plan(
        rows.query_starts,
        rows.key_starts,
        rows.slots.int(),
        torch.ones(rows.query_starts.numel() - 1, dtype=torch.int32, device=q.device),
        heads,
        kv_heads,
        dim,
        1,
        custom_mask=position_mask(rows) if how == "mask" else None,
        sm_scale=scale,
        q_data_type=q.dtype,
        kv_data_type=k_pool.dtype,
    )
    extra = (rows.positions.int().contiguous(), scale) if how == "positions" else ()
    return wrapper.run(q.contiguous(), pools, *extra)


@functools.lru_cache(maxsize=1)
def _workspace(device: torch.device) -> torch.Tensor:
    return torch.empty(256 * 1024 * 1024, dtype=torch.uint8, device=device)


@functools.lru_cache(maxsize=8)
def _wrapper(device: torch.device, dim: int, dtype: torch.dtype, how: str) -> Any:
    import flashinfer

    options: dict[str, Any] = {}
    if how == "positions":
        options = {
            "backend": "fa2",
            "jit_args": jit_arguments(dim, dtype),
            "variant_owns_mask": True,
        }
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(device), "NHD", **options)
