"""Ways of running a server: which parts of Canopy each refuses, and which parts tests run there.

One row each. The start, ``canopy doctor`` and docs/reference read these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

POLICIES, GATE, QUEUE, DISK = "policies", "gate", "queue", "disk"
"""Features: Canopy's eviction policies, the session gate, the queue order, and the disk tier. All need
one of the policies, and are refused with them."""
DOCUMENTS = "documents"
"""Feature of the plugin ``canopy_documents``."""

FLAGS = {
    POLICIES: "--radix-eviction",
    GATE: "--canopy-session-gate",
    QUEUE: "--canopy-queue-order",
    DISK: "--hicache-storage-backend canopy",
    DOCUMENTS: "--canopy-documents",
}
"""Flag that enables a feature."""

PARTS = {
    "device": (POLICIES,),
    "host": (POLICIES,),
    "disk": (POLICIES, DISK),
    "documents": (DOCUMENTS,),
}
"""Part of Canopy -> features that may be refused: policies on each tier, and documents."""

REFUSED, SERVED, CACHE, UNTESTED = "refused", "served", "cache", "untested"
"""Levels: refused at start; a real server was tested, on a CPU; the real cache, pools or scheduler were
tested without a server; neither refused nor tested."""

DROP = "drop that option"
ONE = "use 1"
HTTP_APPS = ("sglang.srt.entrypoints.http_server:app", "sglang_canopy.server.start.http_worker:app")
"""SGLang's own HTTP application, and the application that Canopy's workers import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One row: a value of an SGLang option, or a kind of model."""

    name: str
    option: str | None = None
    """Field of ``ServerArgs`` or of SGLang's ``TreeCacheBuildContext``. Another name is only a label of
    a row that refuses nothing."""
    applies: Callable[[Any], bool] = bool
    """Returns whether this value of the option selects the row."""
    variable: str | None = None
    """Environment variable with the same effect."""
    instead: str = DROP
    """Remedy for the error message; empty if there is no remedy."""
    served: tuple[str, ...] = ()
    """Parts at the level ``SERVED``."""
    cache: tuple[str, ...] = ()
    """Parts at the level ``CACHE``."""
    policies: str | None = None
    gate: str | None = None
    queue: str | None = None
    disk: str | None = None
    documents: str | None = None
    """Reasons to refuse a feature, with ``{}`` for the value; ``None`` if it is not refused."""

    def reason(self, feature: str) -> str | None:
        """Return the reason to refuse ``feature``, or ``None``."""
        reason: str | None = getattr(self, feature)
        return reason

    def level(self, part: str) -> str:
        """Return the level of ``part``."""
        if any(self.reason(feature) for feature in PARTS[part]):
            return REFUSED
        return SERVED if part in self.served else CACHE if part in self.cache else UNTESTED

    def remedy(self) -> str:
        """Return the change that lifts the refusal and keeps the feature; empty if there is none."""
        if self.option is None or self.instead not in (DROP, ONE):
            return self.instead
        flag = f"--{self.option.replace('_', '-')}"
        return f"use {flag} 1" if self.instead == ONE else f"leave out {flag}"


def _equals(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _other(*usual: Any) -> Callable[[Any], bool]:
    return lambda value: value is not None and value not in usual


def _exceeds(limit: int) -> Callable[[Any], bool]:
    return lambda value: (value or 0) > limit


def _whole_prefill_graph(config: Any) -> bool:
    """Return whether ``--cuda-graph-config``, as given (a dict) or as resolved by SGLang, has one
    full prefill graph."""
    phase_of = (
        config.get if isinstance(config, Mapping) else lambda phase: getattr(config, phase, None)
    )
    prefill = phase_of("prefill") or {}
    if isinstance(prefill, Mapping):
        return prefill.get("backend") == "full"
    return getattr(prefill, "backend", None) == "full"


_TIERS = ("device", "host", "disk")
_ALL = (*_TIERS, "documents")
_SPECULATIVE: dict[str, Any] = dict.fromkeys(
    (GATE, QUEUE, DOCUMENTS), "speculative decoding is not verified"
)
_DISAGGREGATED: dict[str, Any] = dict.fromkeys(
    (GATE, QUEUE, DISK, DOCUMENTS), "--disaggregation-mode {} is not verified"
)
_LMCACHE = "--enable-lmcache brings its own cache"
_STREAMING = "--enable-streaming-session keeps KV outside the tree"
_NO_TICK = "takes requests without sending the time to the session gate"
_REPLAY = "replays prefill as one CUDA graph, which bypasses documents' KV"
_BREAKABLE = "use --cuda-graph-backend-prefill breakable"

SETUPS = (
    Setup(name="one process, CPU", option="device", applies=_equals("cpu"), served=_ALL),
    Setup(name="CUDA", option="device", applies=_equals("cuda")),
    Setup(name="`--tp-size 2`", option="tp_size", applies=_equals(2), served=_ALL),
    Setup(name="`--tp-size` above 2", option="tp_size", applies=_exceeds(2)),
    Setup(
        name="`--dp-size`",
        option="dp_size",
        applies=_exceeds(1),
        served=("device",),
        cache=("disk",),
        instead=ONE,
        documents="--dp-size {} is not supported yet",
    ),
    Setup(
        name="`--enable-dp-attention`",
        option="enable_dp_attention",
        cache=("device",),
        gate="data-parallel attention is not verified",
        documents="data-parallel attention is not verified",
    ),
    Setup(
        name="`--pp-size`",
        option="pp_size",
        applies=_exceeds(1),
        served=("device",),
        cache=("disk",),
        instead=ONE,
        gate="--pp-size {} is not supported yet",
        queue="--pp-size {} is not verified",
        documents="--pp-size {} is not supported yet",
    ),
    Setup(name="MLA models (DeepSeek, Kimi)", option="is_mla", served=_TIERS),
    Setup(
        name="sliding-window models",
        option="is_hybrid_swa",
        served=("device", "host"),
        instead="",
        disk="pages on disk have no sliding windows",
        documents="documents' KV of sliding-window layers cannot be moved",
    ),
    Setup(
        name="Mamba and linear attention",
        option="is_hybrid_ssm",
        served=("device", "host"),
        instead="",
        disk="pages on disk have no Mamba or linear-attention state",
        documents="Mamba or linear-attention state cannot be put together from documents",
    ),
    Setup(name="images in prompts", option="is_multimodal", served=("device",), cache=("host",)),
    Setup(name="LoRA adapters", option="enable_lora", served=_TIERS),
    Setup(
        name="pages of 1 token",
        option="page_size",
        applies=_equals(1),
        served=("device", "documents"),
        cache=("host",),
    ),
    Setup(name="pages of 16 tokens", option="page_size", applies=_equals(16), served=_ALL),
    Setup(
        name="pages of 64 tokens",
        option="page_size",
        applies=_equals(64),
        served=("device",),
        cache=("host", "disk"),
    ),
    Setup(
        name="the overlap schedule",
        option="overlap_schedule",
        served=("device", "documents"),
        cache=("host", "disk"),
    ),
    Setup(
        name="chunked prefill",
        option="chunked_prefill_size",
        applies=_exceeds(0),
        served=("device", "documents"),
    ),
    Setup(
        name="`--enable-mixed-chunk`", option="enable_mixed_chunk", served=("device", "documents")
    ),
    Setup(
        name="`--enable-priority-scheduling`",
        option="enable_priority_scheduling",
        served=("device",),
    ),
    Setup(name="structured output", option="structured_output", served=("device",)),
    Setup(name="`sglang.Engine` in Python", option="engine", served=("device",)),
    Setup(
        name="speculative decoding by n-grams",
        option="speculative_algorithm",
        applies=_equals("NGRAM"),
        **_SPECULATIVE,
    ),
    Setup(
        name="speculative decoding with a draft model (EAGLE, MTP)",
        option="speculative_algorithm",
        applies=_other("NGRAM"),
        cache=("device", "host"),
        disk="--speculative-algorithm {} keeps KV of a second model, which pages on disk do not have",
        **_SPECULATIVE,
    ),
    Setup(
        name="diffusion language models (`--dllm-algorithm`)",
        option="dllm_algorithm",
        gate="--dllm-algorithm {} stages requests outside the waiting queue",
        queue="--dllm-algorithm {} stages requests outside the waiting queue",
        documents="--dllm-algorithm {} is not verified",
    ),
    Setup(
        name="`--disaggregation-mode prefill`",
        option="disaggregation_mode",
        applies=_other("null", "decode"),
        cache=("device", "host"),
        **_DISAGGREGATED,
    ),
    Setup(
        name="`--disaggregation-mode decode`",
        option="disaggregation_mode",
        applies=_equals("decode"),
        instead="",
        policies="--disaggregation-mode decode keeps SGLang's own order: prompts are computed, and "
        "policies learn, on the prefill side; give --radix-eviction to the servers of that side",
        **_DISAGGREGATED,
    ),
    Setup(
        name="`--grpc-port`",
        option="grpc_port",
        applies=_other(),
        variable="SGLANG_GRPC_PORT",
        cache=("device",),
        gate="--grpc-port {} is not verified",
    ),
    *(
        Setup(
            name=f"`--{name.replace('_', '-')}`",
            option=name,
            cache=("device",),
            gate=f"--{name.replace('_', '-')} {_NO_TICK}",
        )
        for name in ("grpc_mode", "smg_grpc_mode")
    ),
    Setup(
        name="`--tokenizer-worker-num` above 1",
        option="tokenizer_worker_num",
        applies=_exceeds(1),
        served=("device",),
        instead=ONE,
        gate="--tokenizer-worker-num {}: the workers do not share their sessions",
        documents="--tokenizer-worker-num {}: the workers do not share their documents",
    ),
    Setup(name="`--ep-size` above 1", option="ep_size", applies=_exceeds(1)),
    Setup(name="`--moe-a2a-backend`", option="moe_a2a_backend", applies=_other("none")),
    Setup(name="`--moe-runner-backend`", option="moe_runner_backend", applies=_other("auto")),
    Setup(name="several nodes (`--nnodes`)", option="nnodes", applies=_exceeds(1)),
    Setup(
        name="HiCache storage `mooncake`",
        option="hicache_storage_backend",
        applies=_equals("mooncake"),
        served=("device", "host", "disk"),
    ),
    Setup(
        name="HiCache storage other than `canopy` and `mooncake` (file, nixl, hf3fs, ...)",
        option="hicache_storage_backend",
        applies=_other("canopy", "mooncake", "dynamic"),
    ),
    Setup(
        name="`--enable-unified-memory`",
        option="enable_unified_memory",
        policies="--enable-unified-memory shares one pool among kinds of memory, which is not verified",
    ),
    Setup(
        name="`--enable-session-radix-cache`",
        option="enable_session_radix_cache",
        policies="--enable-session-radix-cache keeps nodes by session",
    ),
    Setup(
        name="`--radix-cache-backend`",
        option="radix_cache_backend",
        policies="--radix-cache-backend chooses another cache",
    ),
    Setup(
        name="`--enable-lmcache`", option="enable_lmcache", policies=_LMCACHE, documents=_LMCACHE
    ),
    Setup(
        name="`--enable-flexkv`",
        option="enable_flexkv",
        policies="--enable-flexkv brings its own cache",
    ),
    Setup(
        name="an external cache linker",
        option="enable_unified_cache_external_linker",
        policies="the external cache linker is not verified",
    ),
    Setup(
        name="`--enable-streaming-session`",
        option="enable_streaming_session",
        policies=_STREAMING,
        documents=_STREAMING,
    ),
    Setup(
        name="`--use-ray`",
        option="use_ray",
        policies="--use-ray starts processes that load no plugins",
    ),
    Setup(
        name="`SGLANG_HTTP_SERVER_APP_PATH`",
        applies=lambda value: value not in (None, *HTTP_APPS),
        variable="SGLANG_HTTP_SERVER_APP_PATH",
        instead="unset that variable",
        policies="SGLANG_HTTP_SERVER_APP_PATH={} names an HTTP application that loads no plugins",
    ),
    Setup(
        name="`SGLANG_RUST_SERVER`",
        applies=lambda value: str(value).lower() in ("1", "true", "yes", "y"),
        variable="SGLANG_RUST_SERVER",
        instead="unset that variable",
        policies="SGLANG_RUST_SERVER takes requests that bypass Canopy's stamps",
    ),
    Setup(
        name="`SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=rust`",
        applies=lambda value: str(value).lower() == "rust",
        variable="SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND",
        instead="unset that variable",
        policies="SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND={} names SGLang's Rust core, which has no observer "
        "and no victim by policy",
    ),
    Setup(
        name="`--disable-radix-cache`",
        option="disable_radix_cache",
        policies="--disable-radix-cache, or SGLang for this model, turns the prefix cache off, so that "
        "there is nothing to evict",
    ),
    Setup(
        name="`--kv-cache-dtype`",
        option="kv_cache_dtype",
        applies=_other("auto"),
        instead="use auto",
        documents="--kv-cache-dtype {} keeps quantised KV, which cannot be moved",
    ),
    Setup(
        name="quantised weights",
        option="quantization",
        instead="serve the model unquantised",
        documents="quantised weights are not supported yet",
    ),
    Setup(
        name="`--cuda-graph-backend-prefill full`",
        option="cuda_graph_backend_prefill",
        applies=_equals("full"),
        instead=_BREAKABLE,
        documents=f"--cuda-graph-backend-prefill full {_REPLAY}",
    ),
    Setup(
        name="`--cuda-graph-config` with prefill full",
        option="cuda_graph_config",
        applies=_whole_prefill_graph,
        instead=_BREAKABLE,
        documents=f"--cuda-graph-config with prefill full {_REPLAY}",
    ),
    Setup(
        name="`--enable-return-hidden-states`",
        option="enable_return_hidden_states",
        documents="hidden states of reused tokens are never computed",
    ),
    Setup(
        name="`--enable-encoder-swa-bounded-replay`",
        option="enable_encoder_swa_bounded_replay",
        documents="the encoder replay rewrites the same batches",
    ),
)
"""Rows in order of precedence: the first refusal that applies is reported."""
