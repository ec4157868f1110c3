"""Set-ups that cannot run a Canopy policy: one table and one check.

Asked twice: on the command line, for a short answer at once, and where each scheduler builds its
cache, which no way of starting SGLang goes round (``sglang.Engine`` reads no command line).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_PAST_THE_ENTRY = "takes requests past the entry that stamps them"


def _given(value: Any) -> bool:
    return bool(value)


@dataclass(frozen=True, slots=True)
class Refusal:
    """One option that Canopy's policies cannot be used with."""

    option: str
    """A field of ``ServerArgs``."""
    why: str
    """With ``{}`` for the value."""
    refused: Callable[[Any], bool] = _given
    """Whether this value of the option is one."""
    variable: str | None = None
    """An environment variable that sets the same."""
    instead: str = "drop that option"


REFUSALS = (
    Refusal("enable_session_radix_cache", "--enable-session-radix-cache keeps nodes by session"),
    Refusal("radix_cache_backend", "--radix-cache-backend chooses another cache"),
    Refusal("enable_lmcache", "--enable-lmcache brings its own cache"),
    Refusal("enable_flexkv", "--enable-flexkv brings its own cache"),
    Refusal("enable_unified_cache_external_linker", "the external cache linker is not verified"),
    Refusal("speculative_algorithm", "speculative decoding keys the tree by token pairs"),
    Refusal("enable_streaming_session", "--enable-streaming-session keeps KV outside the tree"),
    Refusal("use_ray", "--use-ray starts processes that load no plugins"),
    Refusal("grpc_mode", f"--grpc-mode {_PAST_THE_ENTRY}"),
    Refusal("smg_grpc_mode", f"--smg-grpc-mode {_PAST_THE_ENTRY}"),
    Refusal(
        "grpc_port",
        "--grpc-port {}: SGLang's own gRPC server is not verified",
        lambda port: port is not None,
        "SGLANG_GRPC_PORT",
    ),
    Refusal(
        "tokenizer_worker_num",
        "--tokenizer-worker-num {} starts HTTP workers that load no plugins",
        lambda workers: (workers or 1) > 1,
        instead="use 1",
    ),
    Refusal(
        "disaggregation_mode",
        "--disaggregation-mode {} is not verified",
        lambda mode: mode not in (None, "null"),
    ),
)
"""In the order in which they are reported: the first that applies is."""

_TRUE = ("1", "true", "yes", "y")
"""What SGLang takes for true in a variable."""
OUR_STORAGE = "sglang_canopy.storage.backend"


def unsupported(server_args: Any, environment: Mapping[str, str] = os.environ) -> str | None:
    """Why these server arguments cannot run a Canopy policy; ``None`` if they can."""
    lru = "or use --radix-eviction lru"
    for refusal in REFUSALS:
        value = getattr(server_args, refusal.option, None)
        if value is None and refusal.variable:
            value = environment.get(refusal.variable) or None
        if refusal.refused(value):
            return f"{refusal.why.format(value)}; {refusal.instead}, {lru}"
    if environment.get("SGLANG_RUST_SERVER", "").lower() in _TRUE:
        return f"SGLANG_RUST_SERVER {_PAST_THE_ENTRY}; unset that variable, {lru}"
    mode = getattr(server_args, "hicache_host_memory_mode", None)
    if mode == "buffer_only" and _our_storage(server_args):
        return (
            "--hicache-host-memory-mode buffer_only writes pages to our disk tier without what is "
            "known of them; use the mode 'cache', or another --hicache-storage-backend"
        )
    return None


def _our_storage(server_args: Any) -> bool:
    """Whether the disk tier is ours, before or after it was rewritten for SGLang."""
    backend = getattr(server_args, "hicache_storage_backend", None)
    if backend != "dynamic":
        return backend == "canopy"
    extra = getattr(server_args, "hicache_storage_backend_extra_config", None)
    try:
        given = json.loads(extra) if isinstance(extra, str) else extra
    except ValueError:
        return False
    return isinstance(given, Mapping) and given.get("module_path") == OUR_STORAGE
