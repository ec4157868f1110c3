"""A stand-in for `sgl_kernel` on a CPU: the symbols that SGLang 0.5.23's CPU engine imports by
name.

The real package has compiled kernels for CUDA, or for CPUs with AMX; no build on PyPI imports
without CUDA. Two of its functions are called while serving; they are here in plain torch. The rest
belong to speculative decoding: they can be imported, and raise an error when called.

It registers no operator in `torch.ops.sgl_kernel`, so SGLang detects that the AMX kernels are
absent.
"""

from __future__ import annotations

import ctypes

import torch

__all__ = ["assign_req_to_token_pool_cpu", "copy_all_layer_kv_cache_cpu"]


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new slots into its row: `req_to_token[r, start:end] = next slots`.

    Shapes: `req_pool_indices`, `start_offset`, `end_offset` [requests]; `req_to_token`
    [rows, pool_len]; `out_cache_loc` [sum of end - start], in request order.
    """
    next_slot = 0
    for row, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()
    ):
        req_to_token[row, start:end] = out_cache_loc[next_slot : next_slot + end - start]
        next_slot += end - start


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Move KV rows within every layer's buffer: `layer[tgt_loc] = layer[src_loc]`.

    `data_ptrs` and `strides` give each buffer's address and its row size in bytes. All source rows
    are read before any target row is written, so the two sets may overlap.
    """
    if tgt_loc.numel() == 0:
        return
    target_rows, source_rows = tgt_loc.long(), src_loc.long()
    rows = int(max(target_rows.max(), source_rows.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist()):
        memory = (ctypes.c_uint8 * (rows * stride)).from_address(address)
        layer = torch.frombuffer(memory, dtype=torch.uint8).view(rows, stride)
        layer[target_rows] = layer[source_rows]


def __getattr__(name: str):  # type: ignore[no-untyped-def]
    # All other CPU symbols that SGLang imports at module level are for `--speculative-*`.
    if not name.endswith("_cpu"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r} (CPU stand-in)")

    def raise_missing(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(
            f"sgl_kernel.{name} needs compiled kernels: speculative decoding does not run in "
            "Canopy's CPU mode; start without --speculative-* flags"
        )

    return raise_missing
