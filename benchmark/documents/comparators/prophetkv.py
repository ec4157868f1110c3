"""After ProphetKV (arXiv 2602.02579), from its abstract and public descriptions, not its code:
tokens that the question attends to.

First pass: the question runs through all layers over the reused KV; each layer's attention to the
context is averaged over the question's tokens and the heads, and the layers' scores are fused into
one by their mean. Second pass: the highest-scored share of the context is recomputed in all layers.
"""

from __future__ import annotations

import torch

from canopy_documents.fuse import rows as row_forward
from canopy_documents.fuse.selectors.base import Selector, SelectorInput, top_allowed
from canopy_documents.store.chunk import FusedPrompt
from canopy_documents.store.device_copy import to_device


class ProphetKV(Selector):
    """Spend the budget on the context tokens with the most attention from the question over all layers."""

    name = "prophetkv"
    reads_cache = True

    def choose(self, inputs: SelectorInput) -> torch.Tensor:
        scores = context_attention(inputs)
        return top_of_chunks(inputs.prompt, scores, inputs.budget)


def context_attention(inputs: SelectorInput) -> torch.Tensor:
    """Return the attention ``[prompt]`` of the question to what precedes it: a softmax over these keys alone,
    the mean over question tokens, heads and layers; 0 for the question itself."""
    model, prompt, cache = inputs.model, inputs.prompt, inputs.cache
    shape, tail_positions = model.shape, prompt.tail_positions()
    end = int(tail_positions[0])
    attention = torch.zeros(len(prompt), device=model.device)
    if end == 0:
        return attention
    outside_chunks = (~prompt.in_chunk()).nonzero()[:, 0]
    outside_chunks = outside_chunks[outside_chunks >= inputs.exact_prefix_tokens]
    rows = torch.cat([outside_chunks, tail_positions]).unique()
    question_row = int((rows < end).sum())  # sorted: from here on the question
    ids = to_device(prompt.ids[rows.to(prompt.ids.device)], model.device)
    rows = to_device(rows, model.device)
    earlier = torch.arange(end, device=model.device)
    group, scale = shape.heads // shape.kv_heads, shape.head_dim**-0.5

    def add_attention(layer: int, q: torch.Tensor, _: torch.Tensor) -> None:
        keys, _ = cache.read(layer, earlier)
        queries = (q[question_row:].float() * scale).unflatten(1, (shape.kv_heads, group))
        weight = torch.einsum("mhgd,nhd->mhgn", queries, keys.float()).softmax(dim=-1)
        attention[:end] += weight.mean(dim=(0, 1, 2)) / shape.layers

    row_forward.probe_rows(model, ids, rows, cache, shape.layers - 1, add_attention)
    return model.whole(attention)


def top_of_chunks(prompt: FusedPrompt, score: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ``count`` best positions of all chunks together by ``score [prompt]``.

    Not the prompt's last token, which is always computed.
    """
    in_chunk = prompt.in_chunk()
    in_chunk[len(prompt) - 1] = False
    return top_allowed(score, in_chunk, count)
