"""Which tokens of a prompt are computed: first, and after a retraction.

Selectors that look at the prompt need its chunks' KV in place. Where the whole prompt is in this
window its slots are used and nothing is done twice; with chunked prefill the later slots do not
exist yet, and a cache of its own is filled for the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from canopy_chunks.fuse.cache import KVCache, dense_cache
from canopy_chunks.fuse.choice import ChosenTokens
from canopy_chunks.fuse.model import Model
from canopy_chunks.fuse.placement import copy_positions, place_chunks
from canopy_chunks.fuse.selectors import Context, Offline, Selector
from canopy_chunks.fuse.transfer import Transfer
from canopy_chunks.server.model_view import row_cache
from canopy_chunks.store.chunk import FusedPrompt, Placed
from canopy_chunks.store.suffix import base_and_skip


@dataclass(frozen=True, slots=True)
class PromptSlots:
    """One prompt in the server's pool, as far as its slots are allocated.

    ids: the whole prompt, on the host; row: pool slots by position; prefix: tokens whose exact KV the
    row holds; placed: chunks from there on.
    """

    ids: torch.Tensor
    row: torch.Tensor
    prefix: int
    placed: tuple[Placed, ...]

    @property
    def prompt(self) -> FusedPrompt:
        return FusedPrompt(self.ids, self.placed)

    @property
    def whole(self) -> bool:
        """Whether every token has a slot."""
        return self.row.numel() >= self.ids.numel()

    def certain(self) -> torch.Tensor:
        """``[n]`` bool: tokens outside chunks and the last one, which are always computed."""
        computed = ~self.prompt.in_chunk()
        computed[: self.prefix] = False
        computed[-1] = True
        return computed

    def cache(self, model: Model, runner: Any, arrivals: list[Transfer]) -> KVCache:
        """Where a selector looks at the reused KV: the pool, or a copy where slots are missing."""
        n = self.ids.numel()
        pool = row_cache(runner, self.row[:n], self.prefix)
        if self.whole:
            pool.arrivals = arrivals
            return pool
        separate = dense_cache(model, n)
        copy_positions(pool, separate, self.prefix)
        return separate


@dataclass(frozen=True, slots=True)
class ExactChunk:
    """Stands in for the chunk that a cached prefix is: exact where it lies, nothing to place."""

    ids: tuple[int, ...]
    prefix: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


def choose_tokens(
    model: Model,
    runner: Any,
    slots: PromptSlots,
    selector: Selector,
    ratio: float,
    arrivals: list[Transfer],
) -> tuple[ChosenTokens, bool]:
    """The tokens of the prompt to compute; and whether the chunks' KV is in place already, or on its
    way in ``arrivals``."""
    computed = slots.certain()
    if ratio <= 0.0:
        return ChosenTokens(computed), False
    if ratio >= 1.0:
        computed[slots.prefix :] = True
        return ChosenTokens(computed), False
    if isinstance(selector, Offline):
        computed[_choose_offline(model, slots, selector, ratio)] = True
        computed[: slots.prefix] = False
        return ChosenTokens(computed), False
    prompt, cache = slots.prompt, slots.cache(model, runner, arrivals)
    place_chunks(model, slots.placed, cache, prompt.in_chunk())
    context = _context(model, prompt, cache, ratio, slots.prefix)
    return ChosenTokens(computed, selector.choose(context).tokens), slots.whole


def _choose_offline(
    model: Model, slots: PromptSlots, selector: Offline, ratio: float
) -> torch.Tensor:
    for p in slots.placed:
        selector.scores(base_and_skip(p.chunk)[0])
    context = Context(model, slots.prompt, None, ratio)  # type: ignore[arg-type]
    return selector.choose(context).tokens


def _context(
    model: Model, prompt: FusedPrompt, cache: KVCache, ratio: float, prefix: int
) -> Context:
    """The cached prefix, as an exact chunk of its own, is neither run nor given a budget.

    The ratio is lowered so that the budget in tokens stays what it is without that chunk.
    """
    if not prefix:
        return Context(model, prompt, cache, ratio)
    placed = list(prompt.placed)
    end = prefix
    if placed and placed[0].start == prefix and prompt.first_is_exact:
        end = placed.pop(0).end
    ids = tuple(prompt.ids[:end].tolist())
    whole = FusedPrompt(prompt.ids, (Placed(ExactChunk(ids), 0), *placed))  # type: ignore[arg-type]
    same = ratio * prompt.reusable / max(1, whole.reusable) + 1e-9
    return Context(model, whole, cache, same)


def replan(
    earlier: torch.Tensor, prefix: int, placed: Sequence[Placed], total: int
) -> torch.Tensor:
    """``[total]`` bool: the tokens to compute when a request that was planned before is begun anew.

    earlier: the tokens computed then, True where the earlier prefix was. What came since (its own answer)
    is computed, and so is what no chunk holds any more: the answer goes on as it began.
    """
    computed = torch.ones(total, dtype=torch.bool)
    reused = ~earlier[:total]
    inside = torch.zeros_like(reused)
    for p in placed:
        inside[p.start : p.end] = True
    computed[: reused.numel()] = ~(reused & inside)
    computed[:prefix] = False
    computed[total - 1] = True
    return computed
