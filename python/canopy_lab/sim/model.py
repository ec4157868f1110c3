"""KV bytes and prefill FLOPs of a token, from a model's dimensions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_canopy.errors import CanopyError

Config = Mapping[str, Any]
KV_BYTES_KEY = "kv_bytes_per_token"
"""Key of a config that gives the bytes over all layers."""
_INNER_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Fields of composite configs that contain the language model."""
_DIFFERING_KEYS = (
    *(
        "hybrid_override_pattern",
        "layers_block_type",
        "full_attention_interval",
        "attn_layer_period",
    ),
    *("attn_type_list", "linear_attn_config", "compress_ratios", "num_loops", "per_layer_config"),
    "index_topk",
)
"""Fields of models whose layers differ: states, windows, indexes, loops."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a decoder-only transformer. ``bytes_per_element``: of the cache."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the feed-forward for one token (all active experts together)."""
    bytes_per_element: int = 2
    kv_bytes_override: int = 0
    """Bytes over all layers; 0: all layers store all KV heads."""

    def kv_bytes_per_token(self) -> int:
        """Return the bytes of KV that one token occupies over all layers."""
        all_layers = 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_element
        return self.kv_bytes_override or all_layers


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


def _shape(config: Config) -> ModelShape:
    inner = next((config[name] for name in _INNER_KEYS if isinstance(config.get(name), dict)), None)
    text: Config = inner if inner is not None else config
    layers, hidden, heads = (
        _number(text, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    kv_bytes = config.get(KV_BYTES_KEY)
    if kv_bytes is None:
        _check_layers(text)
    experts = text.get("num_experts_per_tok") or 0
    width = text.get("intermediate_size") or 4 * hidden
    shape = ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or hidden // heads,
        intermediate=experts * (text.get("moe_intermediate_size") or width) if experts else width,
        bytes_per_element=1 if _is_eight_bit(config) else 2,
    )
    if kv_bytes is not None:
        return replace(shape, kv_bytes_override=_number(config, KV_BYTES_KEY))
    if text.get("kv_lora_rank"):
        values = _number(text, "kv_lora_rank") + _number(text, "qk_rope_head_dim")
        return replace(shape, kv_bytes_override=layers * values * shape.bytes_per_element)
    return shape


def _check_layers(text: Config) -> None:
    """Raise ``CanopyError`` if layers differ in what they store for a token."""
    layer_types = {str(layer_type) for layer_type in text.get("layer_types") or ()}
    differing = [name for name in _DIFFERING_KEYS if text.get(name) not in (None, False)]
    differing += sorted(layer_types - {"full_attention", "sliding_attention", "chunked_attention"})
    if text.get("kv_lora_rank") and text.get("use_mla") is False:
        differing.append("use_mla")
    if differing:
        raise CanopyError(
            f"its layers store different KV ({', '.join(differing)}), which is not computed here; write a "
            f"running server's figure (kv_bytes_per_token in /canopy/status) into it as {KV_BYTES_KEY!r}"
        )


def _number(config: Config, name: str) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise CanopyError(f"it must have {name} (a whole number above 0), got {value!r:.40}")
    return value


def _is_eight_bit(config: Config) -> bool:
    """Return whether a checkpoint asks for an 8-bit KV cache."""
    quantization = config.get("quantization_config") or {}
    kv_scheme = quantization.get("kv_cache_scheme") or {}
    algorithm = str(quantization.get("kv_cache_quant_algo"))
    return kv_scheme.get("num_bits") == 8 or algorithm.upper() == "FP8"
