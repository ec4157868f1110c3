"""The same sparse prefill through FlashInfer, with a custom mask: the second opinion.

Two independent implementations behind one interface check each other on a GPU
(``scripts/gpu_check.sh``). The mask has queries x keys bits, so the Triton kernel, which needs
none, is the one that ships. Written from FlashInfer's documented interface; not yet run on a GPU.
"""

from __future__ import annotations

import functools

import torch

from canopy_kernel.attention import Rows


def unavailable(k_pool: torch.Tensor | None = None) -> str | None:
    """Why FlashInfer cannot be used here, or None when it can."""
    if not torch.cuda.is_available():
        return "FlashInfer needs CUDA"
    try:
        import flashinfer  # noqa: F401
    except ImportError as error:
        return f"flashinfer-python is not importable: {error}"
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


@functools.lru_cache(maxsize=1)
def _workspace(device: torch.device) -> torch.Tensor:
    return torch.empty(256 * 1024 * 1024, dtype=torch.uint8, device=device)


def sparse_prefill_flashinfer(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, rows: Rows, scale: float
) -> torch.Tensor:
    """Arguments as :func:`canopy_kernel.attention.reference`. Raises RuntimeError with the reason
    where FlashInfer cannot run."""
    reason = unavailable(k_pool)
    if reason:
        raise RuntimeError(reason)
    import flashinfer

    heads, dim = q.shape[1:]
    kv_heads = k_pool.shape[2]
    one = [p.reshape(-1, 1, kv_heads, dim) for p in (k_pool, v_pool)]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(q.device), "NHD")
    wrapper.plan(
        rows.query_starts,
        rows.key_starts,
        rows.slots.int(),
        torch.ones(rows.query_starts.numel() - 1, dtype=torch.int32, device=q.device),
        heads,
        kv_heads,
        dim,
        1,
        custom_mask=position_mask(rows),
        sm_scale=scale,
        q_data_type=q.dtype,
        kv_data_type=k_pool.dtype,
    )
    return wrapper.run(q.contiguous(), (one[0], one[1]))
