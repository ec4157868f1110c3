"""HiCache without a GPU: an unpinned host pool, and copies between the two pools in torch.

On a CPU the "device" pool and the host pool are both ordinary memory. SGLang pins the host pool
through CUDA and takes its copy functions from the CUDA build of `sgl_kernel`, even for the `direct`
I/O backend; this module supplies those functions. Index tensors are tokens, whole pages in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

RESERVE_BYTES = 1 << 30
"""Memory left free next to a host pool. SGLang leaves 10 GiB, which is all of a small machine."""


def disable_pinning(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """BEFORE hook of the host pools' `__init__`: do not pin memory, which only CUDA needs."""
    return args, {**kwargs, "pin_memory": False}


def replace_kernel_io(server_args: Any) -> None:
    """BEFORE hook of `resolve_layout_io_compatibility`: the `kernel` I/O backend needs CUDA.

    SGLang's own resolution follows and selects the host layout for `direct`.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    if resolving_view(server_args).hicache_io_backend == "kernel":
        declare_resolution(server_args, "canopy_cpu", hicache_io_backend="direct")


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy tokens between two pools, each [tokens, heads, head size] per layer."""
    source_rows, target_rows = src_indices.long(), dst_indices.long()
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst.index_copy_(0, target_rows, src.index_select(0, source_rows))


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy pages of every layer to the host.

    `src_ptrs`: all K layers then all V layers, each [tokens, heads, head size]. `dst_ptrs`: K and
    V host buffers [pages, layers, page size, heads, head size].
    """
    source_rows, pages = src_indices.long(), _page_numbers(dst_indices, page_size)
    layer_count = len(src_ptrs) // len(dst_ptrs)
    for index, src in enumerate(src_ptrs):
        host = dst_ptrs[index // layer_count]
        host[pages, index % layer_count] = src.index_select(0, source_rows).view(
            -1, *host.shape[2:]
        )


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy pages of one layer back from the host: K and V, shapes as in the previous function."""
    pages, target_rows = _page_numbers(src_indices, page_size), dst_indices.long()
    for host, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst.index_copy_(0, target_rows, host[pages, layer_id].view(-1, *dst.shape[1:]))


def _page_numbers(token_indices: torch.Tensor, page_size: int) -> torch.Tensor:
    return token_indices[::page_size].long() // page_size


TRANSFERS = (
    transfer_kv_direct,
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_per_layer_direct_pf_lf,
)
