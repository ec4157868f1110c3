"""Low- and high-frequency energy of K and V (CacheTune, equations 2 to 7)."""

from __future__ import annotations

import torch

from canopy_documents.fuse.selectors.base import OfflineSelector
from canopy_documents.store.chunk import Chunk
from canopy_kernel.lowpass import lowpass_energy

LOW_SHARE = 0.5
"""Share of the one-sided spectrum that counts as low (the paper's value)."""


def layer_scores(chunk: Chunk, high: bool = False, alpha: float = LOW_SHARE) -> torch.Tensor:
    """Return ``[layers, n]``: each token's energy, normalised by layer (equations 2 to 6)."""
    energy = lowpass_energy(chunk.raw_k.flatten(2), chunk.v.flatten(2), alpha, high)
    return energy / (energy.sum(dim=1, keepdim=True) + 1e-12)


class FrequencySelector(OfflineSelector):
    """Low-frequency energy, averaged over layers: one set of tokens for all layers."""

    name = "frequency"

    def score(self, chunk: Chunk) -> torch.Tensor:
        return layer_scores(chunk).mean(dim=0)
