"""Compare one prompt's greedy answers after full recompute and after reuse."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch

from canopy_chunks.fuse import rows as engine
from canopy_chunks.fuse.cache import dense_cache
from canopy_chunks.fuse.fusion import fused_steps
from canopy_chunks.fuse.model import Model
from canopy_chunks.fuse.selectors import make_selector
from canopy_chunks.quality.answers import greedy_steps
from canopy_chunks.quality.tenant_meter import TIE_NATS
from canopy_chunks.store.chunk import FusedPrompt, Placed
from canopy_chunks.store.device_copy import to_device

ANSWER_TOKENS = 16


def pieces_of(n: int, piece: int) -> int:
    """Return the maximum pieces of a check of ``n`` prompt tokens; ``piece``: tokens per piece."""
    return 2 * -(-n // piece) + 3 + 2 * (ANSWER_TOKENS - 1)


class NoLongerStored(Exception):
    """A prompt's documents were removed from the store during its check."""


@torch.no_grad()
def answers_differ(
    model: Model,
    ids: Sequence[int],
    find_placed: Callable[[], tuple[Placed, ...]],
    selector: str,
    ratio: float,
    end: int | None,
    stop: engine.Stop,
) -> Generator[None, None, bool]:
    """Return whether the first ``ANSWER_TOKENS`` greedy tokens, up to ``end``, differ beyond a near
    tie.

    Computes in a separate cache of one prompt. Yields between pieces, and may be abandoned there. A
    piece of a prefill that ``stop`` ends is repeated. Ranks of a split model take the same steps.
    Raises NoLongerStored if ``find_placed`` returns no documents by then.
    """
    n = len(ids)
    tokens = to_device(torch.tensor(ids, dtype=torch.long), model.device)
    cache = dense_cache(model, n + ANSWER_TOKENS)
    size = engine.piece_tokens(model.device)
    for first in range(0, n, size):
        piece = tokens[first : first + size]
        last = first + piece.numel()
        at = torch.arange(first, last, device=model.device)
        hidden = yield from engine.repeated(model, piece, at, cache.upto(last), stop)
    rows = [model.logits(hidden[-1:])[0]]
    begun = [int(rows[0].argmax())]
    full = yield from greedy_steps(model, cache, n, begun, ANSWER_TOKENS, end, rows)
    yield
    placed = find_placed()  # as late as possible: batches may have run in between
    if not placed:
        raise NoLongerStored
    prompt = FusedPrompt(tokens, placed)
    choose = make_selector(selector)
    fused = yield from fused_steps(model, prompt, cache.upto(n), choose, ratio, size, stop)
    first_token = [int(fused.logits.argmax())]
    reused = yield from greedy_steps(model, cache, n, first_token, ANSWER_TOKENS, end)
    return differ(full, reused, rows)


def differ(full: Sequence[int], reused: Sequence[int], rows: Sequence[torch.Tensor]) -> bool:
    """Return whether two answers differ beyond a near tie; rows: the logits of ``full``."""
    for want, got, row in zip(full, reused, rows):
        if want != got:
            return float(row[want] - row[got]) > TIE_NATS
    return False
