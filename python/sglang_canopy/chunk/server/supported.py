"""Servers that cannot reuse chunks: each is refused at start, by name, with the way out."""

from __future__ import annotations

from typing import Any

from sglang_canopy.chunk.server.options import SPLIT_SELECTORS, Options

_REFUSED = (
    ("speculative_algorithm", "speculative decoding keeps KV of a second model"),
    ("enable_lmcache", "--enable-lmcache brings its own reuse"),
    ("enable_dp_attention", "data-parallel attention is not verified"),
    ("enable_streaming_session", "--enable-streaming-session keeps KV outside the tree"),
    ("enable_return_hidden_states", "hidden states of reused tokens are never computed"),
    ("enable_encoder_swa_bounded_replay", "the encoder replay rewrites the same batches"),
)


def unsupported(server_args: Any) -> str | None:
    """Why these server arguments cannot reuse chunks; ``None`` if they can."""
    for name, why in _REFUSED:
        if getattr(server_args, name, None):
            return f"{why}; drop that option, or chunk reuse"
    for name in ("pp_size", "dp_size", "tokenizer_worker_num"):
        size = getattr(server_args, name, 1) or 1
        if size > 1:
            flag = "--" + name.replace("_", "-")
            return f"{flag} {size} is not done yet, only 1; drop it, or chunk reuse"
    kv = getattr(server_args, "kv_cache_dtype", "auto")
    if kv not in ("auto", None):
        return f"--kv-cache-dtype {kv} keeps quantised KV, which cannot be moved; use auto"
    if getattr(server_args, "quantization", None):
        return "quantised weights are not done yet; serve the model unquantised"
    mode = getattr(server_args, "disaggregation_mode", "null")
    if mode not in (None, "null"):
        return f"--disaggregation-mode {mode} is not done; drop it, or chunk reuse"
    return None


def split_unsupported(options: Options) -> str | None:
    """Why these options cannot be used with tensor parallelism; ``None`` if they can."""
    if options.tp_size == 1:
        return None
    if options.disk_mb:
        return (
            "--canopy-chunk-disk-mb with --tp-size above 1: a file that one rank alone cannot read "
            "would leave the ranks out of step; keep chunks in memory"
        )
    if options.chosen_selector not in SPLIT_SELECTORS:
        return (
            f"selector {options.chosen_selector!r} looks at one rank's own heads; with --tp-size "
            f"above 1 allowed are {', '.join(SPLIT_SELECTORS)}"
        )
    return None
