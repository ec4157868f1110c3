"""The choice of tokens to compute: at the first plan, and after a retraction.

Selectors that read the prompt need its documents' KV in place. If this window holds the whole prompt,
its slots are used, so that no KV is written twice. With chunked prefill the later slots do not
exist yet, so a separate cache is filled for the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from canopy_documents.fuse.cache import KVCache, dense_cache
from canopy_documents.fuse.choice import ChosenTokens
from canopy_documents.fuse.model import Model
from canopy_documents.fuse.placement import copy_positions, place_chunks
from canopy_documents.fuse.selectors import OfflineSelector, Selector, SelectorInput
from canopy_documents.fuse.transfer import RowTransfer
from canopy_documents.server.model_view import row_cache
from canopy_documents.store.chunk import FusedPrompt, PlacedChunk, base_and_skip


@dataclass(frozen=True, slots=True)
class PromptSlots:
    """One prompt in the server's pool, up to its allocated slots.

    ids: the whole prompt, on the host; row: pool slots by position; prefix_tokens: leading tokens whose
    exact KV the row holds; placed: documents after the prefix.
    """

    ids: torch.Tensor
    row: torch.Tensor
    prefix_tokens: int
    placed: tuple[PlacedChunk, ...]

    @property
    def prompt(self) -> FusedPrompt:
        return FusedPrompt(self.ids, self.placed)

    @property
    def has_all_slots(self) -> bool:
        """Whether every token has a slot."""
        return self.row.numel() >= self.ids.numel()

    def always_computed(self) -> torch.Tensor:
        """Return ``[n]`` bool: the tokens always computed, outside documents or last in the prompt."""
        computed = ~self.prompt.in_chunk()
        computed[: self.prefix_tokens] = False
        computed[-1] = True
        return computed

    def selector_cache(self, model: Model, runner: Any, transfers: list[RowTransfer]) -> KVCache:
        """Return the cache in which a selector reads the reused KV: the pool, or a copy if slots
        are missing."""
        n = self.ids.numel()
        pool = row_cache(runner, self.row[:n], self.prefix_tokens)
        if self.has_all_slots:
            pool.transfers = transfers
            return pool
        copied_cache = dense_cache(model, n)
        copy_positions(pool, copied_cache, self.prefix_tokens)
        return copied_cache


@dataclass(frozen=True, slots=True)
class ExactChunk:
    """A cached prefix in the form of a document: exact at its position, with no KV to place."""

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
    transfers: list[RowTransfer],
) -> tuple[ChosenTokens, bool]:
    """Choose the tokens of the prompt to compute.

    Returns the choice, and whether the documents' KV is already in place or being transferred in
    ``transfers``.
    """
    computed = slots.always_computed()
    if ratio <= 0.0:
        return ChosenTokens(computed), False
    if ratio >= 1.0:
        computed[slots.prefix_tokens :] = True
        return ChosenTokens(computed), False
    if isinstance(selector, OfflineSelector):
        computed[_choose_offline(model, slots, selector, ratio)] = True
        computed[: slots.prefix_tokens] = False
        return ChosenTokens(computed), False
    prompt, cache = slots.prompt, slots.selector_cache(model, runner, transfers)
    place_chunks(model, slots.placed, cache, prompt.in_chunk())
    inputs = _inputs_with_prefix(model, prompt, cache, ratio, slots.prefix_tokens)
    return ChosenTokens(computed, selector.choose(inputs)), slots.has_all_slots


def _choose_offline(
    model: Model, slots: PromptSlots, selector: OfflineSelector, ratio: float
) -> torch.Tensor:
    for p in slots.placed:
        selector.scores(base_and_skip(p.chunk)[0])
    inputs = SelectorInput(model, slots.prompt, None, ratio)  # type: ignore[arg-type]
    return selector.choose(inputs)


def _inputs_with_prefix(
    model: Model, prompt: FusedPrompt, cache: KVCache, ratio: float, prefix_tokens: int
) -> SelectorInput:
    """Return inputs that treat the cached prefix as an exact document, which is not run and has no
    budget.

    The ratio is lowered so that the budget in tokens is the same as without that document.
    """
    if not prefix_tokens:
        return SelectorInput(model, prompt, cache, ratio)
    placed = list(prompt.placed)
    end = prefix_tokens
    if placed and placed[0].start == prefix_tokens and prompt.first_is_exact:
        end = placed.pop(0).end
    ids = tuple(prompt.ids[:end].tolist())
    whole = FusedPrompt(prompt.ids, (PlacedChunk(ExactChunk(ids), 0), *placed))  # type: ignore[arg-type]
    adjusted_ratio = ratio * prompt.chunk_tokens / max(1, whole.chunk_tokens) + 1e-9
    return SelectorInput(model, whole, cache, adjusted_ratio)


def replan(
    computed_before: torch.Tensor, prefix_tokens: int, placed: Sequence[PlacedChunk], total: int
) -> torch.Tensor:
    """Return the tokens, ``[total]`` bool, to compute after a planned request was retracted.

    computed_before: ``[n]`` bool, True for the earlier prefix. Tokens added since then (its
    own output) are computed, and so are tokens that are no longer in a document, so that the answer
    continues consistently.
    """
    computed = torch.ones(total, dtype=torch.bool)
    reused = ~computed_before[:total]
    in_document = torch.zeros_like(reused)
    for p in placed:
        in_document[p.start : p.end] = True
    computed[: reused.numel()] = ~(reused & in_document)
    computed[:prefix_tokens] = False
    computed[total - 1] = True
    return computed
