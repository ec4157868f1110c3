"""Fused prefill: reuse the chunks' KV and recompute the chosen tokens."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

import torch

from canopy_documents.fuse import rows as row_forward
from canopy_documents.fuse.cache import KVCache
from canopy_documents.fuse.model import Model
from canopy_documents.fuse.placement import place_chunks
from canopy_documents.fuse.selectors.base import Selector, SelectorInput
from canopy_documents.store.chunk import FusedPrompt

HEAD_TOKENS = 32
"""A shorter head runs with the probe and again later: a separate pass would cost more."""


@dataclass(slots=True)
class Fused:
    """The last token's logits ``[vocab]``, and the rows computed at layer 0."""

    logits: torch.Tensor
    rows: torch.Tensor


def fused_prefill(
    model: Model, prompt: FusedPrompt, cache: KVCache, selector: Selector, ratio: float
) -> Fused:
    """Prefill a prompt, recomputing ``ratio`` of its chunk tokens and reusing the rest.

    Tokens outside chunks and the prompt's last token are always computed. At ratio 1 this is a
    plain prefill.
    """
    return row_forward.finish(
        fused_steps(model, prompt, cache, selector, ratio, len(prompt), row_forward.Stop())
    )


@torch.no_grad()
def fused_steps(
    model: Model,
    prompt: FusedPrompt,
    cache: KVCache,
    selector: Selector,
    ratio: float,
    size: int,
    stop: row_forward.Stop,
) -> Generator[None, None, Fused]:
    """Take the steps of :func:`fused_prefill`: the choice, then ``size`` rows each.

    A step of rows that ``stop`` ends is repeated.
    """
    inside = prompt.in_chunk()
    inside[len(prompt) - 1] = False
    ready = 0
    context = SelectorInput(model, prompt, cache, ratio)
    if selector.reads_cache and 0 < ratio < 1:
        place_chunks(model, prompt.placed, cache, inside)
        ready = yield from _run_head(model, prompt, cache, size, stop)
        tokens = selector.choose(replace(context, ready=ready)).cpu()
    else:
        tokens = torch.empty(0, dtype=torch.long)
        if ratio > 0:
            tokens = selector.choose(context).cpu() if ratio < 1 else inside.nonzero()[:, 0]
        reused = inside.clone()
        reused[tokens] = False
        place_chunks(model, prompt.placed, cache, reused)
    needed = ~inside
    needed[tokens] = True
    every = needed.nonzero()[:, 0].to(model.device)
    yield
    hidden = yield from _compute(model, prompt, every[ready:], cache, size, stop)
    return Fused(model.logits(hidden[-1:])[0], every)


def _run_head(
    model: Model, prompt: FusedPrompt, cache: KVCache, size: int, stop: row_forward.Stop
) -> Generator[None, None, int]:
    """Compute the tokens before the first chunk; returns their number.

    No chunk precedes them, so their KV is exact and a probing selector can skip them. Returns 0 if
    they are too few.
    """
    count = prompt.placed[0].start if prompt.placed else 0
    if count < HEAD_TOKENS:
        return 0
    head = torch.arange(count, device=model.device)
    yield from _compute(model, prompt, head, cache, size, stop)
    return count


def _compute(
    model: Model,
    prompt: FusedPrompt,
    rows: torch.Tensor,
    cache: KVCache,
    size: int,
    stop: row_forward.Stop,
) -> Generator[None, None, torch.Tensor]:
    """Run ``rows``, ``size`` in a step; returns the hidden states of the last step."""
    for some in rows.split(size):
        hidden = yield from row_forward.attempt_again(model, prompt.ids[some], some, cache, stop)
    return hidden
