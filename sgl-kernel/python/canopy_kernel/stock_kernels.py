"""FlashInfer's and FA3's paged attention as :data:`.decomposition.Paged`, and the choice between them.

FlashInfer is imported if the server uses it; FA3's function comes from the server's own backend. Neither
has been run on a GPU in this form yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from canopy_kernel import decomposition
from canopy_kernel.decomposition import Blocks, Paged

WORKSPACE_BYTES = 128 * 1024 * 1024
"""Workspace recommended by FlashInfer for split results; unused if the server shares its own."""
DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class FlashInferPaged:
    """FlashInfer's stock ``BatchPrefillWithPagedKVCacheWrapper``, planned once per forward.

    workspace: the server's buffer, used by one kernel at a time on one stream; created if None. The
    host waits once per forward for the blocks' prefixes, unless ``Rows.host_positions`` is set. block:
    queries per block.
    """

    workspace: torch.Tensor | None = None
    block: int = decomposition.BLOCK
    _wrapper: Any = None
    _planned: Any = None

    def __call__(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        blocks: Blocks,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Run as a :data:`.decomposition.Paged`, with log-sum-exp of base 2."""
        key = (blocks, scale, q.dtype, q.shape[1:], k_pool.shape[2])
        if self._planned is None or self._planned[0] is not blocks or self._planned[1:] != key[1:]:
            self._plan(q, k_pool, blocks, scale)
            self._planned = key
        out, lse = self._wrapper.run(q, (k_pool, v_pool), return_lse=True)
        return out, lse, 1.0

    def _plan(self, q: torch.Tensor, k_pool: torch.Tensor, blocks: Blocks, scale: float) -> None:
        if self._wrapper is None:
            import flashinfer

            if self.workspace is None:
                self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
            self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD")
        lists = decomposition.page_lists(blocks)
        self._wrapper.plan(
            blocks.query_starts,
            lists.starts,
            lists.indices,
            lists.last_page,
            q.shape[1],
            k_pool.shape[2],
            q.shape[2],
            blocks.page_size,
            causal=False,
            sm_scale=scale,
            q_data_type=q.dtype,
            kv_data_type=k_pool.dtype,
        )


@dataclass(slots=True)
class FlashAttentionPaged:
    """FA3's ``flash_attn_with_kvcache`` over a page table. The host does not wait.

    attend: that function from the server's backend. block: queries per block; FA3 packs the query heads
    of a KV head into the rows of one tile, so 64 queries fill it.
    """

    attend: Callable[..., Any]
    block: int = decomposition.BLOCK
    _made: tuple[Any, ...] = field(default=(None,))

    def __call__(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        blocks: Blocks,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Run as a :data:`.decomposition.Paged`, with log-sum-exp of base e, ``[heads, m]`` in memory."""
        if self._made[0] is not blocks:
            starts = blocks.query_starts
            if q.is_cuda:
                starts = starts.pin_memory().to(q.device, non_blocking=True)
            self._made = (blocks, decomposition.page_table(blocks), starts)
        _, table, starts = self._made
        out, lse, *_ = self.attend(
            q=q,
            k_cache=k_pool,
            v_cache=v_pool,
            page_table=table,
            cache_seqlens=blocks.prefixes,
            cu_seqlens_q=starts,
            max_seqlen_q=blocks.queries,
            softmax_scale=scale,
            causal=False,
            return_softmax_lse=True,
        )
        return out, lse.T, 1.0 / math.log(2)


@dataclass(frozen=True, slots=True)
class Choice:
    """Stock kernel for a server's backend, or None for Triton alone. reason: one sentence."""

    paged: Paged | None
    reason: str


def flashinfer_block(head_dim: int, capability: int) -> int:
    """Return queries per block for FlashInfer on a chip (80, 90, ..). Its Hopper kernel has tiles of 128
    rows of one query head, or 192 at head size 64; others pack the heads of a KV head."""
    if capability != 90:
        return decomposition.BLOCK
    return 192 if head_dim == 64 else 128


def choose(
    name: str,
    backend: Any,
    head_dim: int,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    device: str,
    capability: int,
) -> Choice:
    """Choose by the server's attention backend (``flashinfer``, ``fa3``, ``triton``, ...).

    The result is Triton alone if the stock kernel is missing or does not support the shape or type.
    """
    if device != "cuda":
        return Choice(None, f"the device is {device}, which runs the torch path")
    if name not in ("flashinfer", "fa3"):
        return Choice(None, f"the server's attention backend is {name}")
    if head_dim not in DIMS:
        return Choice(None, f"heads have {head_dim} numbers; {name} is used for 64, 128 and 256")
    if dtype not in DTYPES or pool_dtype != dtype:
        return Choice(
            None, f"queries are {dtype} and the pool {pool_dtype}; {name} is used where both are "
            "float16 or bfloat16"
        )  # fmt: skip
    if name == "fa3":
        attend = getattr(backend, "flash_attn_with_kvcache", None)
        if attend is None:
            return Choice(None, "this server's fa3 backend holds no flash_attn_with_kvcache")
        return Choice(FlashAttentionPaged(attend), "the server's attention backend is fa3")
    try:
        import flashinfer  # noqa: F401
    except ImportError as error:
        return Choice(None, f"flashinfer cannot be imported: {error}")
    workspace = getattr(backend, "workspace_buffer", None)
    paged = FlashInferPaged(workspace, flashinfer_block(head_dim, capability))
    return Choice(paged, "the server's attention backend is flashinfer")
