"""Per-layer nested sets: more rows in the first layers, fewer in the last, the same cost in all."""

from __future__ import annotations

import torch

from canopy_chunks.selectors.base import Context, SelectedTokens, top

SLOPE = 0.5
"""Budgets fall linearly from (1 + SLOPE) to (1 - SLOPE) times the mean over the layers."""


def nested_choice(context: Context, score: torch.Tensor, slope: float = SLOPE) -> SelectedTokens:
    """Nested sets from ``score [layers, prompt]`` (``-inf`` outside chunks).

    A row at layer l is worth its mean score over the layers from l on. Rows outside chunks are
    kept throughout; the mean number of chunk rows over the layers is the context's budget.
    """
    layers = score.shape[0]
    inside = torch.isfinite(score[0])
    ahead = score.masked_fill(~inside, 0.0).flip(0).cumsum(0).flip(0)
    ahead = ahead / torch.arange(layers, 0, -1)[:, None]
    steps = torch.linspace(1 + slope, 1 - slope, layers)
    counts = [min(round(float(f) * context.budget), int(inside.sum())) for f in steps]
    first = top(ahead[0].masked_fill(~inside, float("-inf")), counts[0])

    def narrow(layer, positions, k, v):  # type: ignore[no-untyped-def]
        if layer == 0 or counts[layer] == counts[layer - 1]:
            return None
        at = positions.cpu()
        chunk_row = inside[at]
        chunk_row[at == len(inside) - 1] = False
        keep = ~chunk_row
        rows = chunk_row.nonzero()[:, 0]
        keep[rows[top(ahead[layer][at[rows]], counts[layer])]] = True
        return keep.nonzero()[:, 0].to(positions.device)

    return SelectedTokens(first, narrow)
