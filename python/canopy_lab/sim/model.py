"""KV bytes and prefill FLOPs of a token, from a model's dimensions."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from canopy_lab.sim import kv_bytes
from sglang_canopy.errors import CanopyError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a decoder-only transformer. ``kv_bytes``: bytes per cached element."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the feed-forward for one token (all active experts together)."""
    kv_bytes: int = 2
    kv_per_token: int = 0
    """Bytes over all layers; 0: all layers store all KV heads."""

    def kv_bytes_per_token(self) -> int:
        """Return the bytes of KV that one token occupies over all layers."""
        plain = 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes
        return self.kv_per_token or plain

    def flops_per_token(self) -> int:
        """Return the forward FLOPs of one token outside attention scores: 2 per weight used.

        Projections (q, k, v, o) and a gated feed-forward. Embeddings and the head are excluded,
        since a prefill computes logits for one position only.
        """
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return 2 * self.layers * (attention + 3 * self.hidden * self.intermediate)

    def prefill_flops(self, tokens: int, cached: int = 0) -> int:
        """Return the FLOPs to prefill ``tokens`` if the first ``cached`` are in the cache.

        Scores and the weighted sum cost ``4 * heads * head_dim`` per query-key pair and layer. A
        token at position p attends to p + 1 keys (causal).
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
    """Load a shape: a preset's name, or the path of a Hugging Face ``config.json`` (or its folder).

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
    if not isinstance(config, dict):
        raise CanopyError(f"model config {str(path)!r} must be a JSON object; give a full one")
    try:
        return _shape(config)
    except CanopyError as error:
        raise CanopyError(f"model config {str(path)!r}: {error}") from None


def _shape(config: kv_bytes.Config) -> ModelShape:
    """Return the dimensions of a config. Raises ``CanopyError``."""
    text = kv_bytes.language_config(config)
    heads, hidden = kv_bytes.heads_of(text), kv_bytes.hidden_of(text)
    experts = text.get("num_experts_per_tok") or text.get("num_experts_per_token") or 0
    width = _width(text, hidden)
    if type(experts) is int and experts:
        width = experts * int(text.get("moe_intermediate_size") or width)
    made = ModelShape(
        layers=kv_bytes.layers_of(text),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_bytes.kv_heads_of(text),
        head_dim=kv_bytes.head_size_of(text),
        intermediate=width,
    )
    exact = kv_bytes.kv_bytes_per_token(config)
    return made if exact == made.kv_bytes_per_token() else replace(made, kv_per_token=exact)


def _width(text: kv_bytes.Config, hidden: int) -> int:
    for name in ("intermediate_size", "ffn_hidden_size", "n_inner", "moe_intermediate_size"):
        value = text.get(name)
        if type(value) is int and value > 0:
            return value
    return 4 * hidden
