"""KV bytes and prefill FLOPs of a token, from a model's dimensions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sglang_canopy.errors import CanopyError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a decoder-only transformer; ``kv_bytes`` is bytes a cached element."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the feed-forward that one token passes (all active experts together)."""
    kv_bytes: int = 2

    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token occupies over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes

    def flops_per_token(self) -> int:
        """Forward FLOPs of one token outside attention scores: 2 per weight passed.

        Projections (q, k, v, o) and a gated feed-forward; embeddings and the head are left
        out, since a prefill computes logits for one position only.
        """
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return 2 * self.layers * (attention + 3 * self.hidden * self.intermediate)

    def prefill_flops(self, tokens: int, cached: int = 0) -> int:
        """FLOPs to prefill ``tokens`` of which the first ``cached`` come from the cache.

        Scores and the weighted sum cost ``4 * heads * head_dim`` a query and key pair and
        layer; a token at position p attends to p + 1 keys (causal).
        """
        pairs = (tokens * (tokens + 1) - cached * (cached + 1)) // 2
        scores = 4 * self.layers * self.heads * self.head_dim * pairs
        return self.flops_per_token() * (tokens - cached) + scores


PRESETS = {
    "qwen3-0.6b": ModelShape(28, 1024, 16, 8, 128, 3072),
    "qwen3-8b": ModelShape(36, 4096, 32, 8, 128, 12288),
    "qwen2.5-7b": ModelShape(28, 3584, 28, 4, 128, 18944),
    "llama-3.1-8b": ModelShape(32, 4096, 32, 8, 128, 14336),
    "llama-3.1-70b": ModelShape(80, 8192, 64, 8, 128, 28672),
}


def load_model_shape(name: str) -> ModelShape:
    """A preset's name, or the path of a Hugging Face ``config.json`` (or its folder).

    Raises ``CanopyError`` for an unknown name, an unreadable file or a missing field.
    """
    if name.lower() in PRESETS:
        return PRESETS[name.lower()]
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError):
        raise CanopyError(
            f"model {name!r} is neither a preset ({', '.join(PRESETS)}) nor a readable "
            "Hugging Face config.json; give one of them"
        ) from None
    config = config.get("text_config", config)
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        experts = int(config.get("num_experts_per_tok") or 0)
        width = int(config["intermediate_size"])
        if experts:
            width = experts * int(config.get("moe_intermediate_size") or width)
        return ModelShape(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=width,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise CanopyError(f"model config {str(path)!r} has no {error}; give a full one") from None
