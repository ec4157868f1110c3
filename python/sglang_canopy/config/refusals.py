"""Set-ups that Canopy's policies, chunk reuse or the disk tier do not support: one table, one
check.

Checked on the command line, for an early error, and when each scheduler builds its cache, which no
way of starting SGLang bypasses (``sglang.Engine`` reads no command line).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

POLICIES, CHUNKS, GATE, QUEUE = "policies", "chunks", "gate", "queue"
DISK = "disk"
"""Features that may be refused: Canopy's eviction policies, the reuse of documents' KV, the session
gate, the queue order, and the disk tier. All except the reuse of documents need one of the
policies, and are refused with them."""

_WITHOUT = {
    POLICIES: "use --radix-eviction lru",
    CHUNKS: "leave out --canopy-chunks",
    GATE: "leave out --canopy-session-gate",
    QUEUE: "leave out --canopy-queue-order",
    DISK: "leave out --hicache-storage-backend",
}
_BYPASSES = "takes requests that bypass Canopy's stamps"
_NO_TICK = "takes requests without sending the time to the session gate"
HTTP_APPS = ("sglang.srt.entrypoints.http_server:app", "sglang_canopy.server.start.http_worker:app")
"""SGLang's own HTTP application, and the application that Canopy's workers import."""
_DISAGGREGATED = "--disaggregation-mode {} is not verified"
_TRUE = ("1", "true", "yes", "y")
"""Values of a variable that SGLang reads as true."""


DROP = "drop that option"
_ONE = "use 1"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One option that policies, chunk reuse or the session gate do not support."""

    option: str | None
    """Field of ``ServerArgs``, or of SGLang's ``TreeCacheBuildContext``."""
    policies: str | None = None
    """Reason for policies, with ``{}`` for the value; ``None`` if supported."""
    chunks: str | None = None
    """Reason for chunk reuse."""
    refused: Callable[[Any], bool] = bool
    """Returns whether this value of the option is refused."""
    variable: str | None = None
    """Environment variable that sets the same."""
    instead: str = DROP
    """Remedy for the error message; empty if there is no remedy."""
    gate: str | None = None
    """Reason for the session gate."""
    queue: str | None = None
    """Reason for the queue order."""
    disk: str | None = None
    """Reason for the disk tier."""

    def remedy(self) -> str:
        """Return the change that lifts the refusal and keeps the feature; empty if there is none."""
        if self.option is None or self.instead not in (DROP, _ONE):
            return self.instead
        flag = f"--{self.option.replace('_', '-')}"
        return f"use {flag} 1" if self.instead == _ONE else f"leave out {flag}"


def _for_both(option: str, why: str, *more: Any, **named: Any) -> Refusal:
    return Refusal(option, why, why, *more, **named)


def _above_one(size: Any) -> bool:
    return (size or 1) > 1


def _other_than(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value is not None and value not in allowed


def whole_prefill_graph(config: Any) -> bool:
    """Return whether ``--cuda-graph-config``, as given (a dict) or as resolved by SGLang, has one
    full prefill graph."""
    of = config.get if isinstance(config, Mapping) else lambda phase: getattr(config, phase, None)
    prefill = of("prefill") or {}
    if isinstance(prefill, Mapping):
        return prefill.get("backend") == "full"
    return getattr(prefill, "backend", None) == "full"


_REPLAY = "replays prefill as one CUDA graph, which passes documents' KV over"
_BREAKABLE = "use --cuda-graph-backend-prefill breakable"

REFUSALS = (
    Refusal(
        "is_hybrid_swa",
        chunks="documents' KV of sliding-window layers cannot be moved",
        disk="pages on disk have no sliding windows",
        instead="",
    ),
    Refusal(
        "is_hybrid_ssm",
        chunks="Mamba or linear-attention state cannot be put together from documents",
        disk="pages on disk have no Mamba or linear-attention state",
        instead="",
    ),
    Refusal(
        "enable_unified_memory",
        "--enable-unified-memory shares one pool among kinds of memory, which is not verified",
    ),
    Refusal("enable_session_radix_cache", "--enable-session-radix-cache keeps nodes by session"),
    Refusal("radix_cache_backend", "--radix-cache-backend chooses another cache"),
    Refusal(
        "speculative_algorithm",
        chunks="speculative decoding is not verified",
        gate="speculative decoding is not verified",
        queue="speculative decoding is not verified",
    ),
    Refusal(
        "speculative_algorithm",
        disk="--speculative-algorithm {} keeps KV of a second model, which pages on disk do not have",
        refused=_other_than("NGRAM"),
    ),
    _for_both("enable_lmcache", "--enable-lmcache brings its own cache"),
    Refusal("enable_flexkv", "--enable-flexkv brings its own cache"),
    Refusal("enable_unified_cache_external_linker", "the external cache linker is not verified"),
    Refusal(
        "enable_dp_attention",
        chunks="data-parallel attention is not verified",
        gate="data-parallel attention is not verified",
    ),
    _for_both("enable_streaming_session", "--enable-streaming-session keeps KV outside the tree"),
    Refusal(
        "enable_return_hidden_states", chunks="hidden states of reused tokens are never computed"
    ),
    Refusal(
        "enable_encoder_swa_bounded_replay", chunks="the encoder replay rewrites the same batches"
    ),
    Refusal("use_ray", "--use-ray starts processes that load no plugins"),
    Refusal("grpc_mode", gate=f"--grpc-mode {_NO_TICK}"),
    Refusal("smg_grpc_mode", gate=f"--smg-grpc-mode {_NO_TICK}"),
    Refusal(
        "grpc_port",
        refused=_other_than(),
        variable="SGLANG_GRPC_PORT",
        gate="--grpc-port {}: gRPC clients get no time to retry",
    ),
    Refusal(
        "tokenizer_worker_num",
        chunks="--tokenizer-worker-num {}: the workers do not share their documents",
        refused=_above_one,
        instead=_ONE,
        gate="--tokenizer-worker-num {}: the workers do not share their sessions",
    ),
    Refusal(
        None,
        "SGLANG_HTTP_SERVER_APP_PATH={} names an HTTP application that loads no plugins",
        refused=lambda value: value not in (None, *HTTP_APPS),
        variable="SGLANG_HTTP_SERVER_APP_PATH",
        instead="unset that variable",
    ),
    Refusal(
        "pp_size",
        None,
        "--pp-size {} is not supported yet",
        _above_one,
        instead=_ONE,
        gate="--pp-size {} is not supported yet",
        queue="--pp-size {} is not verified",
    ),
    Refusal("dp_size", None, "--dp-size {} is not supported yet", _above_one, instead=_ONE),
    Refusal(
        "kv_cache_dtype",
        None,
        "--kv-cache-dtype {} keeps quantised KV, which cannot be moved",
        _other_than("auto"),
        instead="use auto",
    ),
    Refusal(
        "quantization",
        chunks="quantised weights are not supported yet",
        instead="serve the model unquantised",
    ),
    Refusal(
        "cuda_graph_backend_prefill",
        chunks=f"--cuda-graph-backend-prefill full {_REPLAY}",
        refused=lambda backend: backend == "full",
        instead=_BREAKABLE,
    ),
    Refusal(
        "cuda_graph_config",
        chunks=f"--cuda-graph-config with prefill full {_REPLAY}",
        refused=whole_prefill_graph,
        instead=_BREAKABLE,
    ),
    Refusal(
        "disaggregation_mode",
        "--disaggregation-mode decode keeps SGLang's own order: prompts are computed, and policies "
        "learn, on the prefill side; give --radix-eviction to the servers of that side",
        refused=lambda mode: mode == "decode",
        instead="",
    ),
    Refusal(
        "disaggregation_mode",
        refused=_other_than("null"),
        **dict.fromkeys((CHUNKS, GATE, QUEUE, DISK), _DISAGGREGATED),
    ),
    Refusal(
        None,
        f"SGLANG_RUST_SERVER {_BYPASSES}",
        refused=lambda value: str(value).lower() in _TRUE,
        variable="SGLANG_RUST_SERVER",
        instead="unset that variable",
    ),
    Refusal(
        "disable_radix_cache",
        "--disable-radix-cache, or SGLang for this model, turns the prefix cache off, so that there is "
        "nothing to evict",
    ),
)
"""Refusals in order of precedence: the first that applies is reported."""


def unsupported(
    feature: str, *configured: Any, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Return the reason why ``feature``, one of the five above, cannot run; ``None`` if it can.

    ``configured``: a ``ServerArgs``, and the ``TreeCacheBuildContext`` if it exists.
    """
    return next(all_unsupported(feature, *configured, environment=environment), None)


def all_unsupported(
    feature: str, *configured: Any, environment: Mapping[str, str] = os.environ
) -> Iterator[str]:
    """Yield every reason why ``feature`` cannot run, in order of precedence."""
    for why, refusal in applying(feature, *configured, environment=environment):
        ways_out = [way for way in (refusal.instead, _WITHOUT[feature]) if way]
        yield f"{why}; {', or '.join(ways_out)}"


def applying(
    feature: str, *configured: Any, environment: Mapping[str, str] = os.environ
) -> Iterator[tuple[str, Refusal]]:
    """Yield every refusal of ``feature`` that applies, with its reason, in order of precedence."""
    for refusal in REFUSALS:
        why = getattr(refusal, feature)
        if why is None:
            continue
        for value in _values(refusal, configured, environment):
            if refusal.refused(value):
                yield why.format(value), refusal
                break


def _values(
    refusal: Refusal, configured: tuple[Any, ...], environment: Mapping[str, str]
) -> Iterator[Any]:
    """Yield the option's values in all configured objects, or its variable's value if no object
    sets it."""
    given = [getattr(one, refusal.option, None) for one in configured] if refusal.option else []
    values = [value for value in given if value is not None]
    if not values and refusal.variable:
        values = [environment.get(refusal.variable) or None]
    yield from values or [None]
