"""What the question and above all the prompt's last token attend to; nothing exact.

Close to ProphetKV (arXiv 2602.02579), which spends the budget on what the question attends to.

The last token is where the answer starts: its attention in the upper-middle layers marks what
the answer is read from, on some prompts better than the whole question's, on some worse
(docs/research/chunks.md); ``asked`` weighs both alike. A first chunk that was encoded behind exactly what
stands before it needs no recompute at all, so the whole budget goes to the others.
"""

from __future__ import annotations

from canopy_chunks.chunk import FusedPrompt
from canopy_chunks.selectors.base import Context, SelectedTokens, Selector
from canopy_chunks.selectors.query import query_scores, with_heads

HEADS = 0.25
"""Share of the budget for first tokens in ``head+last-token`` and ``head+asked``."""


def exact_chunks(prompt: FusedPrompt) -> int:
    """How many leading chunks are exact: encoded behind the very tokens that precede them.

    That is the first chunk, where the prompt starts with the prefix it was encoded behind.
    """
    if not prompt.placed:
        return 0
    first = prompt.placed[0]
    return int(tuple(prompt.ids[: first.start].tolist()) == first.chunk.prefix)


class LastToken(Selector):
    """The whole budget on what the last token attends to, exact chunks left out."""

    name = "last-token"
    reads_cache = True
    skips_exact = True

    def choose(self, context: Context) -> SelectedTokens:
        return with_heads(context, query_scores(context, 1), 0.0, exact_chunks(context.prompt))


class Asked(Selector):
    """As ``last-token``, half the weight on the last token and half on the rest of the question."""

    name = "asked"
    reads_cache = True
    skips_exact = True

    def choose(self, context: Context) -> SelectedTokens:
        score = query_scores(context, last_weight=0.5)
        return with_heads(context, score, 0.0, exact_chunks(context.prompt))


class HeadLastToken(Selector):
    """A quarter of the budget on the chunks' first tokens, the rest as ``last-token``."""

    name = "head+last-token"
    reads_cache = True
    skips_exact = True

    def choose(self, context: Context) -> SelectedTokens:
        return with_heads(context, query_scores(context, 1), HEADS, exact_chunks(context.prompt))


class HeadAsked(Selector):
    """A quarter of the budget on the chunks' first tokens, the rest as ``asked``."""

    name = "head+asked"
    reads_cache = True
    skips_exact = True

    def choose(self, context: Context) -> SelectedTokens:
        score = query_scores(context, last_weight=0.5)
        return with_heads(context, score, HEADS, exact_chunks(context.prompt))
