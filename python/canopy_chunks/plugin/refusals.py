"""Set-ups without document reuse, and the set-ups in which tests reuse documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_canopy.config.refusals import (
    ADDITIONS,
    DISAGGREGATED,
    LMCACHE,
    ONE,
    STREAMING_SESSION,
    Addition,
    Condition,
    above_one,
    other_than,
    whole_prefill_graph,
)

CHUNKS = "chunks"
"""Name of the feature, and of the reason in :class:`Refusal`."""
FLAG = "--canopy-chunks"
ATTRIBUTE = "_canopy_chunks"
"""Attribute of ``ServerArgs`` with the options (``None``: documents are not reused)."""
OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal(Condition):
    """An option that document reuse does not support."""

    chunks: str
    """Reason, with ``{}`` in place of the value."""


_REPLAY = "replays prefill as one CUDA graph, which passes documents' KV over"
_BREAKABLE = "use --cuda-graph-backend-prefill breakable"

REFUSALS = (
    Refusal(
        "is_hybrid_swa",
        chunks="documents' KV of sliding-window layers cannot be moved",
        instead="",
    ),
    Refusal(
        "is_hybrid_ssm",
        chunks="Mamba or linear-attention state cannot be put together from documents",
        instead="",
    ),
    Refusal("speculative_algorithm", chunks="speculative decoding is not verified"),
    Refusal("enable_lmcache", chunks=LMCACHE),
    Refusal("enable_dp_attention", chunks="data-parallel attention is not verified"),
    Refusal("enable_streaming_session", chunks=STREAMING_SESSION),
    Refusal(
        "enable_return_hidden_states", chunks="hidden states of reused tokens are never computed"
    ),
    Refusal(
        "enable_encoder_swa_bounded_replay", chunks="the encoder replay rewrites the same batches"
    ),
    Refusal(
        "tokenizer_worker_num",
        chunks="--tokenizer-worker-num {}: the workers do not share their documents",
        refused=above_one,
        instead=ONE,
    ),
    Refusal("pp_size", chunks="--pp-size {} is not supported yet", refused=above_one, instead=ONE),
    Refusal("dp_size", chunks="--dp-size {} is not supported yet", refused=above_one, instead=ONE),
    Refusal(
        "kv_cache_dtype",
        chunks="--kv-cache-dtype {} keeps quantised KV, which cannot be moved",
        refused=other_than("auto"),
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
    Refusal("disaggregation_mode", chunks=DISAGGREGATED, refused=other_than("null")),
)
"""Refusals in order of precedence: the first that applies is reported."""

SERVED = frozenset(
    {
        *("one process, CPU", "`--tp-size 2`", "pages of 1 token", "pages of 16 tokens"),
        *("the overlap schedule", "chunked prefill", "`--enable-mixed-chunk`"),
    }
)
"""Set-ups of ``doctor.setups`` in which tests serve documents."""


def is_requested(args: Any) -> bool:
    """Return whether parsed arguments enable document reuse."""
    return getattr(args, "canopy_chunks", None) not in (None, OFF)


ADDITIONS[CHUNKS] = Addition(FLAG, REFUSALS, is_requested, SERVED)
