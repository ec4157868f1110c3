"""CacheBlend: tokens whose V deviates most from the reused one, chosen while computing.

All rows run layer 0 (its K and V know no context); at layer 1 the deviation is known, and a set
somewhat larger than the budget goes on; at layer 2 it is cut to the budget (gradual filtering).
Its layer 0 is paid in full: that is in the timing, not in the ratio. Tokens outside chunks are
never dropped.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from canopy_documents.fuse.model import ForwardEnd
from canopy_documents.fuse.rows import RowsAttention
from canopy_documents.fuse.selectors.base import Selector, SelectorInput, top_positions
from canopy_documents.store.device_copy import to_device

EXTRA_ROWS_FACTOR = 1.5
"""Rows of chunks kept at layer 1, as a multiple of the budget."""


@dataclass
class Filtering(RowsAttention):
    """Drops rows of chunks before layers 1 and 2; the forward ends at layer 2.

    in_chunk: ``[n]`` bool; row_counts: rows left before layers 1 and 2; kept_rows: indices of the rows that
    the last call left, or None. A dropped row's KV stays as it is.
    """

    in_chunk: torch.Tensor | None = None
    row_counts: tuple[int, int] = (0, 0)
    kept_rows: torch.Tensor | None = None

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        self.kept_rows = None
        if layer in (1, 2):
            assert self.in_chunk is not None
            _, reused_v = self.cache.read(layer, self.positions)
            deviation = (v.float() - reused_v.float()).flatten(1).pow(2).sum(dim=1)
            deviation.masked_fill_(~self.in_chunk[self.positions], float("inf"))
            self.kept_rows = rows = top_positions(deviation, self.row_counts[layer - 1])
            self.positions, q, k, v = self.positions[rows], q[rows], k[rows], v[rows]
        return RowsAttention.__call__(self, layer, q, k, v)


class Deviation(Selector):
    """High-KV-deviation tokens, with gradual filtering over layers 1 and 2."""

    name = "hkvd"
    reads_cache = True

    def choose(self, inputs: SelectorInput) -> torch.Tensor:
        prompt, model, budget = inputs.prompt, inputs.model, inputs.budget
        in_chunk = prompt.in_chunk()
        in_chunk[len(in_chunk) - 1] = False
        exact_rows = int((~in_chunk).sum()) - inputs.exact_prefix_tokens  # always kept
        positions = torch.arange(inputs.exact_prefix_tokens, len(prompt), device=model.device)
        filtering = Filtering(
            inputs.cache,
            positions,
            model.shape.head_dim**-0.5,
            last_layer=min(2, model.shape.layers - 1),
            in_chunk=to_device(in_chunk, model.device),
            row_counts=(exact_rows + int(EXTRA_ROWS_FACTOR * budget), exact_rows + budget),
        )
        with contextlib.suppress(ForwardEnd):
            model.forward(prompt.ids[positions], positions, filtering)
        return filtering.positions[to_device(in_chunk, model.device)[filtering.positions]]


class Oracle(Selector):
    """True deviation of K and V from a full prefill, mean over layers: an oracle for comparison."""

    name = "oracle"
    reads_cache = True

    def choose(self, inputs: SelectorInput) -> torch.Tensor:
        from canopy_documents.fuse.cache import dense_cache
        from canopy_documents.fuse.rows import prefill
        from comparators.prophetkv import top_of_chunks

        model, prompt = inputs.model, inputs.prompt
        full_cache = dense_cache(model, len(prompt))
        prefill(model, prompt.ids, full_cache)
        positions = torch.arange(len(prompt), device=model.device)
        score = torch.zeros(len(prompt))
        for layer in range(model.shape.layers):
            tensors = inputs.cache.read(layer, positions), full_cache.read(layer, positions)
            for reused, exact in zip(*tensors):
                deviation = (reused.float() - exact.float()).flatten(1).norm(dim=1)
                score += (deviation / exact.float().flatten(1).norm(dim=1).mean()).cpu()
        return top_of_chunks(prompt, score, inputs.budget)
