"""The KV of one prompt during fusion: a paged pool per layer, and the prompt's slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from canopy_documents.fuse.model import Model
from canopy_documents.store.device_copy import is_host
from canopy_kernel import attention, pages

Result = TypeVar("Result")


@dataclass(slots=True)
class KVCache:
    """One request's row of a paged pool.

    k, v: a view ``[pages, page_tokens, kv_heads, head_dim]`` per layer (keys rotated); slots: ``[n]``
    pool slot of each position; has_identity_slots: slots are 0..n-1 of pages of one token, so that a CPU
    reads keys in place.
    """

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    slots: torch.Tensor
    has_identity_slots: bool = False
    transfers: list[Any] = field(default_factory=list)
    """Transfers into the cache; reads and writes of a layer wait for its rows."""
    _plan_cache: list[tuple[torch.Tensor, list[attention.Block]]] = field(default_factory=list)
    _rows_cache: list[tuple[torch.Tensor, attention.Rows]] = field(default_factory=list)
    _slots_cache: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __len__(self) -> int:
        return self.slots.numel()

    def truncated(self, tokens: int) -> KVCache:
        """Return a view of the first ``tokens`` positions, sharing their KV."""
        return KVCache(self.k, self.v, self.slots[:tokens], self.has_identity_slots, self.transfers)

    def read(self, layer: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K (rotated) and V ``[n, kv_heads, head_dim]`` at ``positions``."""
        slots = self._slots_of(positions)
        return self.read_keys(layer, positions), pages.read(self.v[layer], slots)

    def read_keys(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """Return K (rotated) only, otherwise as :meth:`read`."""
        self.order_after_transfers(layer)
        return pages.read(self.k[layer], self._slots_of(positions))

    def write(self, layer: int, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write K (rotated) and V rows at ``positions``."""
        self.order_after_transfers(layer)
        slots = self._slots_of(positions)
        pages.write(self.k[layer], slots, k)
        pages.write(self.v[layer], slots, v)

    def attend(
        self, layer: int, q: torch.Tensor, positions: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Return the attention of ``q [m, heads, d]``, at sorted ``positions``, to all KV up to each."""
        self.order_after_transfers(layer)
        k, v = self.k[layer], self.v[layer]
        if self.has_identity_slots and is_host(q):
            n = len(self)
            k, v = k[:n, 0], v[:n, 0]
            if q.shape[0] == n:
                return attention.attend_causally(q, k, v, scale)
            return attention.attend(q, k, v, self._plan(positions), scale)
        return attention.sparse_prefill(q, k, v, self._rows(positions), scale)

    def order_after_transfers(self, layer: int) -> None:
        """Order later work on this layer after the arrival of its reused rows."""
        for transfer in self.transfers:
            transfer.order_after(layer)

    def _slots_of(self, positions: torch.Tensor) -> torch.Tensor:
        return _cached_result(self._slots_cache, positions, lambda: self.slots[positions])

    def _rows(self, positions: torch.Tensor) -> attention.Rows:
        """Return the rows' index tensors. Their prefix sums are copied to a device only once."""
        return _cached_result(
            self._rows_cache, positions, lambda: attention.Rows.single(positions, self.slots)
        )

    def _plan(self, positions: torch.Tensor) -> list[attention.Block]:
        return _cached_result(self._plan_cache, positions, lambda: attention.make_blocks(positions))


def _cached_result(
    results: list[tuple[torch.Tensor, Result]], positions: torch.Tensor, make: Callable[[], Result]
) -> Result:
    """Return ``make()`` for these positions, called once for all layers.

    ``results``: the last two by their positions, since a probe has two sets of rows.
    """
    for key_positions, result in results:
        if key_positions is positions:
            return result
    result = make()
    results[:] = [*results[-1:], (positions, result)]
    return result


def dense_cache(model: Model, tokens: int) -> KVCache:
    """Return a separate cache for ``tokens`` positions, for a CPU, a test or an evaluation."""
    shape = model.shape
    size = (shape.layers, tokens, 1, shape.kv_heads, shape.head_dim)
    k = torch.zeros(size, dtype=model.dtype, device=model.device)
    v = torch.zeros(size, dtype=model.dtype, device=model.device)
    slots = torch.arange(tokens, device=model.device)
    return KVCache(list(k), list(v), slots, has_identity_slots=True)
