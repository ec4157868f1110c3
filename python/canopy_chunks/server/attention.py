"""Attention for batches whose rows are not contiguous, on top of SGLang's own backends.

A backend keeps its name and class. While a fused batch runs, ``canopy_plan`` is set and rows attend
by position: a query at position p attends to its own request's keys 0..p. All other batches run the
stock code. On a CPU this is the project's blocked torch attention. On CUDA it depends on the
server's backend: with ``flashinfer`` and ``fa3`` their stock paged kernels run the keys before each
block of rows, and Triton the rest; with other backends Triton runs all keys (``canopy_kernel``).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from canopy_chunks.store.device_copy import is_host
from canopy_kernel import attention, decomposition, pages, stock_kernels, triton_attention, ways

logger = logging.getLogger(__name__)

BACKENDS = ("torch_native", "triton", "flashinfer", "fa3")


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """One fused batch: ``rows`` maps queries and keys to requests.

    arrivals: transfers of reused KV (``transfer.Transfer``) that each layer waits for on its
    stream.
    """

    rows: attention.Rows
    arrivals: tuple[Any, ...] = ()
    _planned: attention.Plan = field(default_factory=list)

    @property
    def positions(self) -> torch.Tensor:
        """Return ``[m]`` true positions of the batch's rows."""
        return self.rows.positions

    def attend(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        scale: float,
        paged: decomposition.Paged | None = None,
    ) -> torch.Tensor:
        """Attend ``q [m, heads, d]`` over a pool's pages; returns q's shape. On a CPU the steps are
        planned once.

        paged: the stock kernel for the keys before each block of rows, if there is one.
        """
        if paged is not None:
            return decomposition.decomposed(q, k_pool, v_pool, self.rows, scale, paged)
        if not is_host(q):
            return attention.sparse_prefill(q, k_pool, v_pool, self.rows, scale)
        if not self._planned:
            self._planned.extend(attention.plan(q, k_pool, self.rows))
        return attention.blocked(q, k_pool, v_pool, self.rows, scale, self._planned)


def fuses(backend: Any) -> bool:
    """Return whether the backend was created under a name that :func:`register` replaced."""
    return hasattr(backend, "canopy_plan")


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
    plan: FusedAttention | None = backend.canopy_plan
    if plan is None:
        return stock(q, k, v, layer, forward_batch, *args, **kwargs)
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    for transfer in plan.arrivals:  # before rows are written: a transfer may include computed rows
        transfer.arrive(layer.layer_id)
    save = kwargs.get("save_kv_cache", args[0] if args else True)
    pool = forward_batch_pool(backend, forward_batch)
    if save and k is not None:
        pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
    query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    paged = _faster_kernel(backend, plan, query, _stock_kernel(backend, query, keys))
    size = 1 if paged is None else backend.canopy_page_size
    out = plan.attend(
        query, pages.paged(keys, size), pages.paged(values, size), layer.scaling, paged
    )
    return out.reshape(q.shape)


def _stock_kernel(backend: Any, q: torch.Tensor, keys: torch.Tensor) -> decomposition.Paged | None:
    """Return the stock kernel for fused batches, chosen and logged at the first call."""
    if backend.canopy_choice is None:
        choice = stock_kernels.choose(
            backend.canopy_name,
            backend,
            q.shape[-1],
            q.dtype,
            keys.dtype,
            q.device.type,
            triton_attention.chip(q.device)[0] if q.is_cuda else 0,
        )
        backend.canopy_choice = choice
        if choice.paged is not None:
            what = f"{backend.canopy_name}'s paged kernel and Triton"
        else:
            what = "Triton alone" if q.is_cuda else "torch"
        logger.info("canopy: rows of fused prompts attend through %s: %s", what, choice.reason)
    return backend.canopy_choice.paged


def _faster_kernel(
    backend: Any, plan: FusedAttention, q: torch.Tensor, paged: decomposition.Paged | None
) -> decomposition.Paged | None:
    """Return ``paged``, or None if Triton alone was faster when measured on this chip."""
    if paged is None or not ways.table():
        return paged
    chip = torch.cuda.get_device_name(q.device)
    alone = plan.rows.once(
        ("triton alone", backend.canopy_name),
        lambda: ways.triton_is_faster(ways.table(), chip, backend.canopy_name, *plan.rows.sizes()),
    )
    return None if alone else paged


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
        if create is not None and not hasattr(create, "canopy_fused"):
            register_attention_backend(name)(_fusing(name, create))


def _fusing(name: str, create: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(create)
    def made(runner: Any) -> Any:
        backend = create(runner)
        backend.canopy_plan = backend.canopy_choice = None
        backend.canopy_name, backend.canopy_page_size = name, getattr(runner, "page_size", 1)
        backend.forward_extend = functools.partial(_forward_extend, backend, backend.forward_extend)
        return backend

    made.canopy_fused = True  # type: ignore[attr-defined]
    return made
