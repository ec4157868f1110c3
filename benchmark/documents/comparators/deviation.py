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

WIDER = 1.5
"""Rows kept at layer 1, times the budget."""


@dataclass
class Filtering(RowsAttention):
    """Drops rows of chunks before layers 1 and 2; the forward ends at layer 2.

    in_chunk: ``[n]`` bool; sizes: rows left after layers 1 and 2; kept: indices of the rows left by
    the last call, or None. A dropped row's KV stays as it is.
    """

    in_chunk: torch.Tensor | None = None
    sizes: tuple[int, int] = (0, 0)
    kept_rows: torch.Tensor | None = None

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        self.kept_rows = None
        if layer in (1, 2):
            assert self.in_chunk is not None
            _, old = self.cache.read(layer, self.positions)
            off = (v.float() - old.float()).flatten(1).pow(2).sum(dim=1)
            off.masked_fill_(~self.in_chunk[self.positions], float("inf"))
            self.kept_rows = keep = top_positions(off, self.sizes[layer - 1])
            self.positions, q, k, v = self.positions[keep], q[keep], k[keep], v[keep]
        return RowsAttention.__call__(self, layer, q, k, v)


class Deviation(Selector):
    """High-KV-deviation tokens, with gradual filtering over layers 1 and 2."""

    name = "hkvd"
    reads_cache = True

    def choose(self, context: SelectorInput) -> torch.Tensor:
        prompt, model, budget = context.prompt, context.model, context.budget
        inside = prompt.in_chunk()
        inside[len(inside) - 1] = False
        exact_rows = int((~inside).sum()) - context.exact_prefix_tokens  # rows that are always kept
        rows = torch.arange(context.exact_prefix_tokens, len(prompt), device=model.device)
        filtering = Filtering(
            context.cache,
            rows,
            model.shape.head_dim**-0.5,
            last=min(2, model.shape.layers - 1),
            in_chunk=to_device(inside, model.device),
            sizes=(exact_rows + int(WIDER * budget), exact_rows + budget),
        )
        with contextlib.suppress(ForwardEnd):
            model.forward(prompt.ids[rows], rows, filtering)
        return filtering.positions[to_device(inside, model.device)[filtering.positions]]


class Oracle(Selector):
    """True deviation of K and V from a full prefill, mean over layers: an oracle for comparison."""

    name = "oracle"
    reads_cache = True

    def choose(self, context: SelectorInput) -> torch.Tensor:
        from canopy_documents.fuse.cache import dense_cache
        from canopy_documents.fuse.rows import prefill
        from comparators.prophetkv import over_chunks

        model, prompt = context.model, context.prompt
        exact = dense_cache(model, len(prompt))
        prefill(model, prompt.ids, exact)
        every = torch.arange(len(prompt), device=model.device)
        score = torch.zeros(len(prompt))
        for layer in range(model.shape.layers):
            for old, new in zip(context.cache.read(layer, every), exact.read(layer, every)):
                off = (old.float() - new.float()).flatten(1).norm(dim=1)
                score += (off / new.float().flatten(1).norm(dim=1).mean()).cpu()
        return over_chunks(prompt, score, context.budget)
