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

MIN_HEAD_TOKENS = 32
"""A shorter head runs with the probe and again later: a separate pass would cost more."""


@dataclass(slots=True)
class FusedResult:
    """The last token's logits ``[vocab]``, and the rows computed at layer 0."""

    logits: torch.Tensor
    rows: torch.Tensor


def fused_prefill(
    model: Model, prompt: FusedPrompt, cache: KVCache, selector: Selector, ratio: float
) -> FusedResult:
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
    step_rows: int,
    stop: row_forward.Stop,
) -> Generator[None, None, FusedResult]:
    """Take the steps of :func:`fused_prefill`: the choice, then ``step_rows`` rows each.

    A step of rows that ``stop`` ends is repeated.
    """
    in_chunk = prompt.in_chunk()
    in_chunk[len(prompt) - 1] = False
    head_tokens = 0
    inputs = SelectorInput(model, prompt, cache, ratio)
    if selector.reads_cache and 0 < ratio < 1:
        place_chunks(model, prompt.placed, cache, in_chunk)
        head_tokens = yield from _run_head(model, prompt, cache, step_rows, stop)
        recomputed = selector.choose(replace(inputs, exact_prefix_tokens=head_tokens)).cpu()
    else:
        recomputed = torch.empty(0, dtype=torch.long)
        if ratio > 0:
            recomputed = selector.choose(inputs).cpu() if ratio < 1 else in_chunk.nonzero()[:, 0]
        is_reused = in_chunk.clone()
        is_reused[recomputed] = False
        place_chunks(model, prompt.placed, cache, is_reused)
    is_computed = ~in_chunk
    is_computed[recomputed] = True
    computed_rows = is_computed.nonzero()[:, 0].to(model.device)
    yield
    hidden = yield from _compute(model, prompt, computed_rows[head_tokens:], cache, step_rows, stop)
    return FusedResult(model.logits(hidden[-1:])[0], computed_rows)


def _run_head(
    model: Model, prompt: FusedPrompt, cache: KVCache, step_rows: int, stop: row_forward.Stop
) -> Generator[None, None, int]:
    """Compute the tokens before the first chunk; returns their number.

    No chunk precedes them, so their KV is exact and a probing selector can skip them. Returns 0 if
    they are too few.
    """
    head_tokens = prompt.placed[0].start if prompt.placed else 0
    if head_tokens < MIN_HEAD_TOKENS:
        return 0
    head = torch.arange(head_tokens, device=model.device)
    yield from _compute(model, prompt, head, cache, step_rows, stop)
    return head_tokens


def _compute(
    model: Model,
    prompt: FusedPrompt,
    rows: torch.Tensor,
    cache: KVCache,
    step_rows: int,
    stop: row_forward.Stop,
) -> Generator[None, None, torch.Tensor]:
    """Run ``rows``, ``step_rows`` in a step; returns the hidden states of the last step."""
    for step in rows.split(step_rows):
        hidden = yield from row_forward.attempt_until_done(
            model, prompt.ids[step], step, cache, stop
        )
    return hidden
