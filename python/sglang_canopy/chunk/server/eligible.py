"""Which requests may be fused, whatever the store has. The others run normally, by reason."""

from __future__ import annotations

from typing import Any

from sglang_canopy.chunk.server.options import Options
from sglang_canopy.chunk.server.wish import Wish

STILL_LEARN = ("too little is known", "planning failed")
"""Reasons for running normally after which the request's documents are encoded all the same."""

_FIELDS = (
    ("lora_id", "lora"),
    ("input_embeds", "input embeddings"),
    ("positional_embed_overrides", "embedding overrides"),
    ("multimodal_inputs", "multimodal"),
    ("session", "session"),
    ("return_hidden_states", "hidden states"),
    ("return_routed_experts", "routed experts"),
    ("beam_list", "beam search"),
)


def refusal(req: Any, wish: Wish, options: Options) -> str | None:
    """Why a request runs normally; ``None`` if it may be fused."""
    if not options.fuses:
        return f"mode {options.mode}"
    if not wish.bounds:
        return "no chunk is long enough"
    if wish.bounds[-1][1] > len(req.origin_input_ids):
        return "aborted or truncated"  # SGLang replaced the prompt after it was created
    if req.return_logprob and 0 <= req.logprob_start_len < len(req.origin_input_ids) - 1:
        return "prompt logprobs"
    return next((why for name, why in _FIELDS if getattr(req, name, None)), None)
