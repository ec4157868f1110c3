"""Ways of running a server: which parts of Canopy each refuses, and which parts tests run there.

One row each. The start, ``canopy doctor`` and docs/reference read these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_canopy.config.option_values import equals, exceeds, has_full_prefill_graph, other_than

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

DROP_REMEDY = "drop that option"
ONE_REMEDY = "use 1"
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
    remedy_text: str = DROP_REMEDY
    """Remedy for the error message; empty if there is no remedy."""
    served: tuple[str, ...] = ()
    """Parts at the level ``SERVED``."""
    cache: tuple[str, ...] = ()
    """Parts at the level ``CACHE``."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Feature -> reason to refuse it, with ``{}`` for the value."""

    def reason(self, feature: str) -> str | None:
        return self.refusals.get(feature)

    def level(self, part: str) -> str:
        if any(self.reason(feature) for feature in PARTS[part]):
            return REFUSED
        return SERVED if part in self.served else CACHE if part in self.cache else UNTESTED

    def remedy(self) -> str:
        """Return the change that lifts the refusal and keeps the feature; empty if there is none."""
        if self.option is None or self.remedy_text not in (DROP_REMEDY, ONE_REMEDY):
            return self.remedy_text
        flag = f"--{self.option.replace('_', '-')}"
        return f"use {flag} 1" if self.remedy_text == ONE_REMEDY else f"leave out {flag}"


_TIERS = ("device", "host", "disk")
_ALL_PARTS = (*_TIERS, "documents")
_SPECULATIVE = dict.fromkeys((GATE, QUEUE, DOCUMENTS), "speculative decoding is not verified")
_DISAGGREGATED = dict.fromkeys(
    (GATE, QUEUE, DISK, DOCUMENTS), "--disaggregation-mode {} is not verified"
)
_LMCACHE_REASON = "--enable-lmcache brings its own cache"
_STREAMING_REASON = "--enable-streaming-session keeps KV outside the tree"
_NO_TICK_REASON = "takes requests without sending the time to the session gate"
_REPLAY_REASON = "replays prefill as one CUDA graph, which bypasses documents' KV"
_BREAKABLE_REMEDY = "use --cuda-graph-backend-prefill breakable"

SETUPS = (
    Setup(name="one process, CPU", option="device", applies=equals("cpu"), served=_ALL_PARTS),
    Setup(name="CUDA", option="device", applies=equals("cuda")),
    Setup(name="`--tp-size 2`", option="tp_size", applies=equals(2), served=_ALL_PARTS),
    Setup(name="`--tp-size` above 2", option="tp_size", applies=exceeds(2)),
    Setup(
        name="`--dp-size`",
        option="dp_size",
        applies=exceeds(1),
        served=("device",),
        cache=("disk",),
        remedy_text=ONE_REMEDY,
        refusals={DOCUMENTS: "--dp-size {} is not supported yet"},
    ),
    Setup(
        name="`--enable-dp-attention`",
        option="enable_dp_attention",
        cache=("device",),
        refusals=dict.fromkeys((GATE, DOCUMENTS), "data-parallel attention is not verified"),
    ),
    Setup(
        name="`--pp-size`",
        option="pp_size",
        applies=exceeds(1),
        served=("device",),
        cache=("disk",),
        remedy_text=ONE_REMEDY,
        refusals={
            **dict.fromkeys((GATE, DOCUMENTS), "--pp-size {} is not supported yet"),
            QUEUE: "--pp-size {} is not verified",
        },
    ),
    Setup(name="MLA models (DeepSeek, Kimi)", option="is_mla", served=_TIERS),
    Setup(
        name="sliding-window models",
        option="is_hybrid_swa",
        served=("device", "host"),
        remedy_text="",
        refusals={
            DISK: "pages on disk have no sliding windows",
            DOCUMENTS: "documents' KV of sliding-window layers cannot be moved",
        },
    ),
    Setup(
        name="Mamba and linear attention",
        option="is_hybrid_ssm",
        served=("device", "host"),
        remedy_text="",
        refusals={
            DISK: "pages on disk have no Mamba or linear-attention state",
            DOCUMENTS: "Mamba or linear-attention state cannot be put together from documents",
        },
    ),
    Setup(name="images in prompts", option="is_multimodal", served=("device",), cache=("host",)),
    Setup(name="LoRA adapters", option="enable_lora", served=_TIERS),
    Setup(
        name="pages of 1 token",
        option="page_size",
        applies=equals(1),
        served=("device", "documents"),
        cache=("host",),
    ),
    Setup(name="pages of 16 tokens", option="page_size", applies=equals(16), served=_ALL_PARTS),
    Setup(
        name="pages of 64 tokens",
        option="page_size",
        applies=equals(64),
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
        applies=exceeds(0),
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
        applies=equals("NGRAM"),
        refusals=_SPECULATIVE,
    ),
    Setup(
        name="speculative decoding with a draft model (EAGLE, MTP)",
        option="speculative_algorithm",
        applies=other_than("NGRAM"),
        cache=("device", "host"),
        refusals={
            DISK: "--speculative-algorithm {} keeps KV of a second model, which pages on disk do not have",
            **_SPECULATIVE,
        },
    ),
    Setup(
        name="diffusion language models (`--dllm-algorithm`)",
        option="dllm_algorithm",
        refusals={
            GATE: "--dllm-algorithm {} stages requests outside the waiting queue",
            QUEUE: "--dllm-algorithm {} stages requests outside the waiting queue",
            DOCUMENTS: "--dllm-algorithm {} is not verified",
        },
    ),
    Setup(
        name="`--disaggregation-mode prefill`",
        option="disaggregation_mode",
        applies=other_than("null", "decode"),
        cache=("device", "host"),
        refusals=_DISAGGREGATED,
    ),
    Setup(
        name="`--disaggregation-mode decode`",
        option="disaggregation_mode",
        applies=equals("decode"),
        remedy_text="",
        refusals={
            POLICIES: "--disaggregation-mode decode keeps SGLang's own order: prompts are computed, and "
            "policies learn, on the prefill side; give --radix-eviction to the servers of that side",
            **_DISAGGREGATED,
        },
    ),
    Setup(
        name="`--grpc-port`",
        option="grpc_port",
        applies=other_than(),
        variable="SGLANG_GRPC_PORT",
        cache=("device",),
        refusals={GATE: "--grpc-port {} is not verified"},
    ),
    *(
        Setup(
            name=f"`--{name.replace('_', '-')}`",
            option=name,
            cache=("device",),
            refusals={GATE: f"--{name.replace('_', '-')} {_NO_TICK_REASON}"},
        )
        for name in ("grpc_mode", "smg_grpc_mode")
    ),
    Setup(
        name="`--tokenizer-worker-num` above 1",
        option="tokenizer_worker_num",
        applies=exceeds(1),
        served=("device",),
        remedy_text=ONE_REMEDY,
        refusals={
            GATE: "--tokenizer-worker-num {}: the workers do not share their sessions",
            DOCUMENTS: "--tokenizer-worker-num {}: the workers do not share their documents",
        },
    ),
    Setup(name="`--ep-size` above 1", option="ep_size", applies=exceeds(1)),
    Setup(name="`--moe-a2a-backend`", option="moe_a2a_backend", applies=other_than("none")),
    Setup(name="`--moe-runner-backend`", option="moe_runner_backend", applies=other_than("auto")),
    Setup(name="several nodes (`--nnodes`)", option="nnodes", applies=exceeds(1)),
    Setup(
        name="HiCache storage `mooncake`",
        option="hicache_storage_backend",
        applies=equals("mooncake"),
        served=("device", "host", "disk"),
    ),
    Setup(
        name="HiCache storage other than `canopy` and `mooncake` (file, nixl, hf3fs, ...)",
        option="hicache_storage_backend",
        applies=other_than("canopy", "mooncake", "dynamic"),
    ),
    Setup(
        name="`--enable-unified-memory`",
        option="enable_unified_memory",
        refusals={
            POLICIES: "--enable-unified-memory shares one pool among kinds of memory, which is not verified"
        },
    ),
    Setup(
        name="`--enable-session-radix-cache`",
        option="enable_session_radix_cache",
        refusals={POLICIES: "--enable-session-radix-cache keeps nodes by session"},
    ),
    Setup(
        name="`--radix-cache-backend`",
        option="radix_cache_backend",
        refusals={POLICIES: "--radix-cache-backend chooses another cache"},
    ),
    Setup(
        name="`--enable-lmcache`",
        option="enable_lmcache",
        refusals={POLICIES: _LMCACHE_REASON, DOCUMENTS: _LMCACHE_REASON},
    ),
    Setup(
        name="`--enable-flexkv`",
        option="enable_flexkv",
        refusals={POLICIES: "--enable-flexkv brings its own cache"},
    ),
    Setup(
        name="an external cache linker",
        option="enable_unified_cache_external_linker",
        refusals={POLICIES: "the external cache linker is not verified"},
    ),
    Setup(
        name="`--enable-streaming-session`",
        option="enable_streaming_session",
        refusals={POLICIES: _STREAMING_REASON, DOCUMENTS: _STREAMING_REASON},
    ),
    Setup(
        name="`--use-ray`",
        option="use_ray",
        refusals={POLICIES: "--use-ray starts processes that load no plugins"},
    ),
    Setup(
        name="`SGLANG_HTTP_SERVER_APP_PATH`",
        applies=lambda value: value not in (None, *HTTP_APPS),
        variable="SGLANG_HTTP_SERVER_APP_PATH",
        remedy_text="unset that variable",
        refusals={
            POLICIES: "SGLANG_HTTP_SERVER_APP_PATH={} names an HTTP application that loads no plugins"
        },
    ),
    Setup(
        name="`SGLANG_RUST_SERVER`",
        applies=lambda value: str(value).lower() in ("1", "true", "yes", "y"),
        variable="SGLANG_RUST_SERVER",
        remedy_text="unset that variable",
        refusals={POLICIES: "SGLANG_RUST_SERVER takes requests that bypass Canopy's stamps"},
    ),
    Setup(
        name="`SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=rust`",
        applies=lambda value: str(value).lower() == "rust",
        variable="SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND",
        remedy_text="unset that variable",
        refusals={
            POLICIES: "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND={} names SGLang's Rust core, which has no observer "
            "and no victim by policy"
        },
    ),
    Setup(
        name="`--disable-radix-cache`",
        option="disable_radix_cache",
        refusals={
            POLICIES: "--disable-radix-cache, or SGLang for this model, turns the prefix cache off, so that "
            "there is nothing to evict"
        },
    ),
    Setup(
        name="`--kv-cache-dtype`",
        option="kv_cache_dtype",
        applies=other_than("auto"),
        remedy_text="use auto",
        refusals={DOCUMENTS: "--kv-cache-dtype {} keeps quantised KV, which cannot be moved"},
    ),
    Setup(
        name="quantised weights",
        option="quantization",
        remedy_text="serve the model unquantised",
        refusals={DOCUMENTS: "quantised weights are not supported yet"},
    ),
    Setup(
        name="`--cuda-graph-backend-prefill full`",
        option="cuda_graph_backend_prefill",
        applies=equals("full"),
        remedy_text=_BREAKABLE_REMEDY,
        refusals={DOCUMENTS: f"--cuda-graph-backend-prefill full {_REPLAY_REASON}"},
    ),
    Setup(
        name="`--cuda-graph-config` with prefill full",
        option="cuda_graph_config",
        applies=has_full_prefill_graph,
        remedy_text=_BREAKABLE_REMEDY,
        refusals={DOCUMENTS: f"--cuda-graph-config with prefill full {_REPLAY_REASON}"},
    ),
    Setup(
        name="`--enable-return-hidden-states`",
        option="enable_return_hidden_states",
        refusals={DOCUMENTS: "hidden states of reused tokens are never computed"},
    ),
    Setup(
        name="`--enable-encoder-swa-bounded-replay`",
        option="enable_encoder_swa_bounded_replay",
        refusals={DOCUMENTS: "the encoder replay rewrites the same batches"},
    ),
)
"""Rows in order of precedence: the first refusal that applies is reported."""
