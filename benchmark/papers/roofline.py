"""An engine profile from published figures: FLOPs, memory bandwidth and a model's dimensions.

A step takes the longer of its arithmetic and its memory traffic, at the share of the peak that such
kernels reach. The result is a bound of the hardware, not a measurement of a server.
"""

from __future__ import annotations

from dataclasses import dataclass

from canopy_lab.sim.model import ModelShape
from canopy_lab.sim.system.engine_profile import PUBLISHED, Bandwidth, EngineProfile

_PREFILL_TOKENS = (1, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CONTEXT_TOKENS = (0, 1024, 4096, 16384, 65536, 131072)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Device:
    """Published peak figures of one accelerator, and of its host link."""

    name: str
    flops_per_s: float
    """Dense BF16 FLOP/s."""
    bytes_per_s: float
    """Device memory."""
    host_bytes_per_s: float
    """Host link, one direction."""
    sources: tuple[str, ...]


EFFICIENCY = {"compute": 0.55, "attention": 0.4, "memory": 0.75, "host": 0.8}
"""Assumed shares of the peak. They are written into the profile."""
STEP_S = 0.003
"""Scheduling, launching and sampling of one step."""


def flops_per_token(shape: ModelShape) -> int:
    """Return the forward FLOPs of one token outside attention scores: 2 per weight used.

    Projections (q, k, v, o) and a gated feed-forward. Embeddings and the head are excluded, since a
    prefill computes logits for one position only.
    """
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    return 2 * shape.layers * (attention + 3 * shape.hidden * shape.intermediate)


def roofline_profile(
    name: str,
    model: str,
    shape: ModelShape,
    weight_bytes: float,
    device: Device,
    date: str,
    *,
    sources: tuple[str, ...] = (),
) -> EngineProfile:
    """A profile of ``model`` on ``device`` from figures alone."""
    compute_flops_per_s = device.flops_per_s * EFFICIENCY["compute"]
    attention_flops_per_s = device.flops_per_s * EFFICIENCY["attention"]
    memory_bytes_per_s = device.bytes_per_s * EFFICIENCY["memory"]
    kv_bytes = shape.kv_bytes_per_token()
    weights_s = weight_bytes / memory_bytes_per_s

    def linear_s(tokens: float) -> float:
        arithmetic_s = flops_per_token(shape) * tokens / compute_flops_per_s
        return max(arithmetic_s, weights_s) + STEP_S

    def scores_s(new: float, context: float) -> float:
        pairs = new * context + new * (new + 1) / 2
        flops = 4 * shape.layers * shape.heads * shape.head_dim * pairs
        read_s = kv_bytes * (context + new) / memory_bytes_per_s
        return max(flops / attention_flops_per_s, read_s)

    def decode_s(batch: float, context: float) -> float:
        return linear_s(batch) + kv_bytes * batch * context / memory_bytes_per_s

    host_bytes_per_s = device.host_bytes_per_s * EFFICIENCY["host"]
    return EngineProfile(
        name=name,
        model=model,
        device=device.name,
        date=date,
        source=PUBLISHED,
        sources=(*device.sources, *sources),
        kv_bytes_per_token=kv_bytes,
        layers=shape.layers,
        prefill_tokens=_PREFILL_TOKENS,
        prefill_linear_s=tuple(linear_s(n) for n in _PREFILL_TOKENS),
        attention_new_tokens=_PREFILL_TOKENS,
        attention_context_tokens=_CONTEXT_TOKENS,
        attention_s=tuple(tuple(scores_s(n, c) for c in _CONTEXT_TOKENS) for n in _PREFILL_TOKENS),
        decode_batch=_BATCH_SIZES,
        decode_context_tokens=_CONTEXT_TOKENS,
        decode_step_s=tuple(tuple(decode_s(b, c) for c in _CONTEXT_TOKENS) for b in _BATCH_SIZES),
        host=Bandwidth(host_bytes_per_s, host_bytes_per_s),
        disk=None,
        notes={"efficiency": {**EFFICIENCY, "step_overhead_s": STEP_S}},
    )
