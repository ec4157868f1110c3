"""Decode several prompts of equal length in a batch, each over its own KV.

The weights are read once for all of them, which is most of a step's time on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from canopy_documents.fuse import rows as row_forward
from canopy_documents.fuse.cache import KVCache
from canopy_documents.fuse.model import Model


@dataclass
class SideBySide:
    """Looks like one ``KVCache``. Rows i*m to (i+1)*m of a batch, m = ``len(positions)``, belong to ``caches[i]``."""

    caches: Sequence[KVCache]
    positions: torch.Tensor
    """``[m]`` positions, the same for every cache."""

    def write(self, layer: int, _: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        m = len(self.positions)
        for cache, cache_k, cache_v in zip(self.caches, k.split(m), v.split(m)):
            cache.write(layer, self.positions, cache_k, cache_v)

    def attend(self, layer: int, q: torch.Tensor, _: torch.Tensor, scale: float) -> torch.Tensor:
        """``q [caches * m, heads, d]`` -> the same shape; each row over its own KV."""
        pairs = zip(self.caches, q.split(len(self.positions)))
        return torch.cat([c.attend(layer, own_q, self.positions, scale) for c, own_q in pairs])


def side_by_side(
    model: Model, caches: Sequence[KVCache], positions: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Run ``ids [caches, m]`` at ``positions [m]``; logits ``[caches, m, vocab]``."""
    step = SideBySide(caches, positions)
    hidden = row_forward.run_rows(model, ids.flatten(), positions.repeat(len(caches)), step)  # type: ignore[arg-type]
    return model.logits(hidden).unflatten(0, ids.shape)
