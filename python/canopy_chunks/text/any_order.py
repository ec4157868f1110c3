"""The order of a request's documents, in the HTTP process (``canopy_order``)."""

from __future__ import annotations

import functools
from typing import Any

from canopy_chunks.text import fields
from canopy_chunks.text.order import Orders

orders = Orders()
"""Orders of documents in earlier prompts of this process."""

OTHER_INPUT = ("image_data", "video_data", "audio_data", "input_embeds")
"""Request fields with input other than text."""
_BY_POSITION = (
    *("positional_embed_overrides", "session_params", "multi_item_delimiter_indices"),
    *("token_indices_to_pool", "return_routed_experts", "return_hidden_states"),
)
"""Request fields whose meaning depends on token positions."""


def has_other_input(obj: Any) -> bool:
    """Return whether a request has input other than text."""
    return any(getattr(obj, name, None) is not None for name in OTHER_INPUT)


def has_fixed_positions(obj: Any) -> bool:
    """Return whether another part of a request, such as an image or the start of prompt logprobs,
    refers to positions in the prompt as sent."""
    if any(getattr(obj, name, None) for name in _BY_POSITION) or has_other_input(obj):
        return True
    start = getattr(obj, "logprob_start_len", None)
    starts = start if isinstance(start, list) else [start]
    return any(one not in (None, -1) for one in starts)


def arranged(
    tokenizer: Any, ids: list[int], bounds: fields.Bounds, tenant: str | None
) -> tuple[list[int], list[int]]:
    """Return a prompt's tokens with its documents in the best order, and their flat bounds."""
    if all(isinstance(one, int) for one in ids):
        ids, bounds = orders.arrange(ids, bounds, tenant, _tokens_of_templates(tokenizer))
    return ids, [x for pair in bounds for x in pair]


@functools.lru_cache(maxsize=1)
def _tokens_of_templates(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that chat templates use as separators: special and added tokens."""
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    return frozenset([*getattr(tokenizer, "all_special_ids", ()), *added.values()])
