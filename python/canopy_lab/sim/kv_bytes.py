"""Bytes of KV that one token occupies, from a Hugging Face ``config.json`` of any architecture.

Attention of many heads stores keys and values of its KV heads in each layer. Latent attention (MLA)
stores one compressed vector and the rotary part of the key. Hybrid models have layers with a state per
sequence (Mamba, linear attention) that store nothing per token. SGLang's pools are laid out in this way
(``srt/mem_cache/memory_pool.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_canopy.errors import CanopyError

Config = Mapping[str, Any]

_INNER = ("text_config", "llm_config", "language_config", "thinker_config", "decoder", "text_model")
"""Fields of composite configs that contain the language model."""
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
    "kv_n_heads",
    "num_attention_groups",
)
_HEAD_SIZE = ("head_dim", "kv_channels", "attention_head_dim")
_STATES = ("linear", "mamba", "conv")
"""Parts of the names of layers that store a state per sequence instead of keys and values."""
_LOOPS = ("num_loops", "loop_num")
"""Passes through the layers, each with separate keys and values."""
_INDEX_SCALE_BYTES = 4
_INDEX_GROUP = 128
"""Values of an index key (DeepSeek sparse attention) that share a scale."""


def language_config(config: Config) -> Config:
    """Return the part of a config that describes its language model."""
    for name in _INNER:
        inner = config.get(name)
        if isinstance(inner, dict) and inner:
            return language_config(inner)
    return config


def first_of(config: Config, names: tuple[str, ...]) -> int:
    """Return the first of ``names`` that is set. Raises ``CanopyError``."""
    for name in names:
        value = config.get(name)
        if type(value) is int and value > 0:
            return value
    raise CanopyError(f"the model's config has none of {', '.join(names)}; give a full one")


def layers_of(config: Config) -> int:
    """Return the layers of the language model. Raises ``CanopyError``."""
    kinds = _kinds(config)
    if kinds and not any(_count(config, name) for name in _LAYERS):
        return len(kinds)
    return first_of(config, _LAYERS)


def _kinds(config: Config) -> list[Any]:
    """Return the kinds of the layers; empty without them."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return list(pattern)
    given = config.get("layer_types") or config.get("layers_block_type")
    return given if isinstance(given, list) else []


def _stores(kind: Any) -> bool:
    """Return whether a layer of a kind stores keys and values."""
    named = isinstance(kind, str) and kind.endswith("attention")
    return kind == "*" or (named and not any(state in kind for state in _STATES))


def heads_of(config: Config) -> int:
    """Return the attention heads. Raises ``CanopyError``."""
    return first_of(config, _HEADS)


def hidden_of(config: Config) -> int:
    """Return the width of the hidden states. Raises ``CanopyError``."""
    return first_of(config, _HIDDEN)


def kv_heads_of(config: Config) -> int:
    """Return the KV heads of a layer. Raises ``CanopyError``."""
    # Falcon's newer architecture has groups despite the flag.
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        return 1
    inner = config.get("attn_config")
    places = [config, inner] if isinstance(inner, dict) else [config]
    for place in places:
        for name in _KV_HEADS:
            value = place.get(name)
            if type(value) is int and value > 0:
                return value
    return heads_of(config)


def head_size_of(config: Config) -> int:
    """Return the width of a head. Raises ``CanopyError``."""
    for name in _HEAD_SIZE:
        value = config.get(name)
        if type(value) is int and value > 0:
            return value
    return hidden_of(config) // heads_of(config)


def kv_bytes_per_token(config: Config, element_bytes: int | None = None) -> int:
    """Return the bytes per token over all layers.

    ``element_bytes``: bytes of one cached value; ``None`` takes 1 for a checkpoint with an 8-bit KV
    cache, else 2. Raises ``CanopyError``.
    """
    width = element_bytes or (1 if _is_eight_bit(config) else 2)
    config = language_config(config)
    layers = attention_layers(config)
    rank = config.get("kv_lora_rank")
    if type(rank) is int and rank > 0 and config.get("use_mla", True):
        rotary = 0 if config.get("use_mla_nope") else first_of(config, ("qk_rope_head_dim",))
        return layers * ((rank + rotary) * width + _index_bytes(config))
    if isinstance(config.get("compress_ratios"), list):
        raise CanopyError(
            "this model compresses its KV by layer (compress_ratios), which is not computed here; give "
            "--kv-bytes-per-token, or a running server's figure (kv_bytes_per_token in /canopy/status)"
        )
    values, kinds = layers * _row(config), _kinds(config)
    for layer, own in _own_layers(config).items():
        if layer < layers_of(config) and (not kinds or any(map(_stores, kinds[layer : layer + 1]))):
            values += _row({**config, **own}) - _row(config)
    return values * width


def _row(config: Config) -> int:
    """Return the number of values of a token in one layer."""
    key = head_size_of(config)
    value = config.get("v_head_dim")
    return kv_heads_of(config) * (key + (value if type(value) is int and value > 0 else key))


def _own_layers(config: Config) -> dict[int, Config]:
    """Return the layers with separate settings (Gemma 4), by number."""
    given = config.get("per_layer_config")
    if not isinstance(given, dict):
        return {}
    return {
        int(at): own for at, own in given.items() if str(at).isdigit() and isinstance(own, dict)
    }


def attention_layers(config: Config) -> int:
    """Return the layers that store keys and values for every token. Raises ``CanopyError``."""
    layers, kinds = layers_of(config), _kinds(config)
    if kinds:
        stored = sum(map(_stores, kinds[:layers]))
    elif isinstance(config.get("attn_type_list"), list):  # MiniMax: 1 is softmax attention
        stored = sum(kind == 1 for kind in config["attn_type_list"][:layers])
    elif _linear_layers(config) is not None:
        stored = _linear_layers(config) or 0
    elif _count(config, "full_attention_interval"):
        stored = layers // _count(config, "full_attention_interval")
    elif _count(config, "attn_layer_period"):  # Jamba
        period, offset = _count(config, "attn_layer_period"), config.get("attn_layer_offset") or 0
        stored = sum(layer % period == offset for layer in range(layers))
    elif config.get("linear_attention") is not None and _count(config, "layer_group_size"):
        stored = layers // _count(config, "layer_group_size")
    elif config.get("model_type") == "zaya":  # attention and experts alternate
        stored = (layers + 1) // 2
    else:
        stored = layers
    if str(config.get("model_type")).startswith("longcat_flash"):  # two attentions in each layer
        stored *= 2
    return stored * max(1, *(_count(config, name) for name in _LOOPS))


def _linear_layers(config: Config) -> int | None:
    """Return the full-attention layers of Kimi's linear models; ``None`` for other models."""
    given = config.get("linear_attn_config")
    full = given.get("full_attn_layers") if isinstance(given, dict) else None
    return len(full) if isinstance(full, list) else None


def _count(config: Config, name: str) -> int:
    value = config.get(name)
    return value if type(value) is int and value > 0 else 0


def _index_bytes(config: Config) -> int:
    """Return the bytes of a layer's index key (DeepSeek sparse attention): values and scales."""
    size = _count(config, "index_head_dim") if _count(config, "index_topk") else 0
    return size + size // _INDEX_GROUP * _INDEX_SCALE_BYTES


def _is_eight_bit(config: Config) -> bool:
    given = config.get("quantization_config")
    if not isinstance(given, dict):
        return False
    scheme = given.get("kv_cache_scheme")
    bits = scheme.get("num_bits") if isinstance(scheme, dict) else None
    return bits == 8 or str(given.get("kv_cache_quant_algo")).upper() == "FP8"
