"""Variants of :class:`canopy_chunks.fuse.selectors.Question`: scores by the question's attention."""

from __future__ import annotations

import math

import torch

from canopy_chunks.fuse.selectors.base import Context, SelectedTokens, Selector, best, join
from canopy_chunks.fuse.selectors.question import question_scores
from canopy_chunks.store.chunk import FusedPrompt
from canopy_chunks.store.device_copy import to_device

HEADS = 0.25
"""Share of the budget for first tokens in ``head+last-token`` and ``head+question``."""


def over_chunks(prompt: FusedPrompt, score: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` best positions of all chunks together by ``score [prompt]``.

    Not the prompt's last token, which is always computed.
    """
    inside = prompt.in_chunk()
    inside[len(prompt) - 1] = False
    return best(score, inside, count)


class Query(Selector):
    """Spend the whole budget on tokens that the question attends to, over all chunks together."""

    name = "query"
    reads_cache = True

    def choose(self, context: Context) -> SelectedTokens:
        return SelectedTokens(over_chunks(context.prompt, question_scores(context), context.budget))


class HeadQuery(Selector):
    """Spend half the budget on the chunks' first tokens, half on tokens that the question attends to."""

    name = "head+query"
    reads_cache = True

    def choose(self, context: Context) -> SelectedTokens:
        return with_heads(context, question_scores(context), 0.5)


class LastToken(Selector):
    """Spend the whole budget on tokens that the last token attends to, without exact chunks."""

    name = "last-token"
    reads_cache = True

    def choose(self, context: Context) -> SelectedTokens:
        return with_heads(
            context, question_scores(context, 1), 0.0, int(context.prompt.first_is_exact)
        )


class HeadLastToken(Selector):
    """A quarter of the budget on the chunks' first tokens, the rest as ``last-token``."""

    name = "head+last-token"
    reads_cache = True

    def choose(self, context: Context) -> SelectedTokens:
        return with_heads(
            context, question_scores(context, 1), HEADS, int(context.prompt.first_is_exact)
        )


class HeadQuestion(Selector):
    """A quarter of the budget on the chunks' first tokens, the rest as ``question``."""

    name = "head+question"
    reads_cache = True

    def choose(self, context: Context) -> SelectedTokens:
        score = question_scores(context, last_weight=0.5)
        return with_heads(context, score, HEADS, int(context.prompt.first_is_exact))


def with_heads(
    context: Context, score: torch.Tensor, share: float, skip: int = 0
) -> SelectedTokens:
    """``share`` of the budget on first tokens of chunks (from the ``skip``-th on), then by score."""
    prompt, heads = context.prompt, []
    for p in prompt.placed[skip:]:
        count = math.floor(share * context.ratio * len(p.chunk))
        heads.append(torch.arange(p.start, p.start + count))
    head, allowed = join(heads), prompt.in_chunk()
    allowed[head] = False
    allowed[len(prompt) - 1] = False
    for p in prompt.placed[:skip]:
        allowed[p.start : p.end] = False
    picked = best(score, allowed, context.budget - head.numel())
    return SelectedTokens(torch.cat([to_device(head, picked.device), picked]).sort()[0])
