"""Attention for batches whose rows are not contiguous, on top of SGLang's own backends.

A backend keeps its name and class. In a fused batch, ``canopy.fused_attention`` is set: rows attend
by position: a query at position p attends to its own request's keys 0..p. All other batches run the
stock code. On a CPU this is the project's blocked torch attention, on CUDA its Triton kernel
(``canopy_kernel``), whatever the server's backend is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from canopy_documents.store.device_copy import is_host
from canopy_kernel import attention, pages

BACKENDS = ("torch_native", "triton", "flashinfer", "fa3")


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """One fused batch: ``rows`` maps queries and keys to requests.

    transfers: transfers of reused KV (``transfer.RowTransfer``) that each layer waits for on its
    stream.
    """

    rows: attention.Rows
    transfers: tuple[Any, ...] = ()
    _block_plan: attention.Plan = field(default_factory=list)

    @property
    def positions(self) -> torch.Tensor:
        """Return ``[m]`` true positions of the batch's rows."""
        return self.rows.positions

    def attend(
        self, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attend ``q [m, heads, d]`` over a pool's pages; returns q's shape. On a CPU the blocks are
        planned once."""
        if not is_host(q):
            return attention.sparse_prefill(q, k_pool, v_pool, self.rows, scale)
        if not self._block_plan:
            self._block_plan.extend(attention.make_plan(self.rows))
        return attention.attend_in_blocks(q, k_pool, v_pool, self.rows, scale, self._block_plan)


@dataclass(slots=True)
class FusionState:
    """State of an attention backend that fuses, at ``backend.canopy``."""

    name: str
    fused_attention: FusedAttention | None = None
    """The attention of the fused batch in progress, if any."""


def fuses(backend: Any) -> bool:
    """Return whether the backend was created under a name that :func:`register` replaced."""
    return hasattr(backend, "canopy")


def _forward_extend(
    backend: Any,
    stock: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: Any,
    v: Any,
    layer: Any,
    forward_batch: Any,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Attend ``q [m, heads * d]``; returns q's shape. The rows' K and V are written first."""
    fused: FusedAttention | None = backend.canopy.fused_attention
    if fused is None:
        return stock(q, k, v, layer, forward_batch, *args, **kwargs)
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    for transfer in fused.transfers:  # before rows are written: it may include computed rows
        transfer.order_after(layer.layer_id)
    save_kv = kwargs.get("save_kv_cache", args[0] if args else True)
    pool = forward_batch_pool(backend, forward_batch)
    if save_kv and k is not None:
        pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
    query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    out = fused.attend(query, pages.view_flat(keys), pages.view_flat(values), layer.scaling)
    return out.reshape(q.shape)


def forward_batch_pool(backend: Any, forward_batch: Any) -> Any:
    """Return the KV pool of a backend, or of its batch if the backend has none."""
    pool = getattr(backend, "token_to_kv_pool", None)
    return pool if pool is not None else forward_batch.token_to_kv_pool


def register() -> None:
    """Register position-wise attention under every known backend name. Idempotent."""
    from sglang.srt.layers.attention.attention_registry import (
        ATTENTION_BACKENDS,
        register_attention_backend,
    )

    for name in BACKENDS:
        create = ATTENTION_BACKENDS.get(name)
        if create is not None and not hasattr(create, "canopy"):
            register_attention_backend(name)(_wrap_backend(name, create))


def _wrap_backend(name: str, create: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(create)
    def create_fusing(runner: Any) -> Any:
        backend = create(runner)
        backend.canopy = FusionState(name)
        backend.forward_extend = functools.partial(_forward_extend, backend, backend.forward_extend)
        return backend

    create_fusing.canopy = True  # type: ignore[attr-defined]
    return create_fusing
