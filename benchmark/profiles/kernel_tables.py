"""An engine profile from published times of single kernels, for any model shape and TP size.

The tables are AIConfigurator's (package ``aiconfigurator-core``, Apache-2.0): matrix products,
attention and all-reduce, measured by NVIDIA with SGLang's kernels. A step is their sum over the
layers, plus one assumed figure per step for the server's work between kernels. So the profile has the
time of kernels, not of a server, and states that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.interpolate import RegularGridInterpolator

from canopy_lab.sim.model import ModelShape
from canopy_lab.sim.system.engine_profile import PUBLISHED, Bandwidth, EngineProfile
from sglang_canopy.errors import CanopyError

PREFILL = (1, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
CONTEXT = (0, 1024, 4096, 16384, 65536, 131072)
BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DTYPE = "bfloat16"

Table = Iterable[Mapping[str, Any]]
"""Rows of one of AIConfigurator's tables; ``latency`` in milliseconds."""


@dataclass(frozen=True, slots=True)
class KernelTables:
    """Tables of a system."""

    gemm: Table
    context_attention: Table
    generation_attention: Table
    all_reduce: Table
    """May be empty if one GPU is enough."""


@dataclass(frozen=True, slots=True)
class GPU:
    """A GPU in AIConfigurator's file of a system."""

    name: str
    memory_bytes: float
    host_bytes_per_s: float
    """One direction."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Assumptions beyond the tables. Written into the profile."""

    step_overhead_s: float = 0.003
    host_share: float = 0.8
    """Share of the host link's peak."""
    memory_share: float = 0.88
    """Share of the GPU's memory for weights and KV (``--mem-fraction-static``)."""


def kernel_profile(
    name: str,
    model: str,
    shape: ModelShape,
    parameters: float,
    tables: KernelTables,
    gpu: GPU,
    *,
    tp: int = 1,
    date: str,
    sources: Sequence[str] = (),
    assumed: Assumptions | None = None,
) -> EngineProfile:
    """Return a profile of ``model`` with ``parameters`` in 16 bits on ``tp`` GPUs.

    Raises ``CanopyError`` if the shape cannot be split over ``tp``, or the tables lack its heads.
    """
    assumed = assumed or Assumptions()
    if tp < 1 or shape.heads % tp or shape.kv_heads % tp:
        raise CanopyError(
            f"{model!r} has {shape.heads} heads and {shape.kv_heads} KV heads: --tp must divide "
            f"both, got {tp}"
        )
    product = _gemm(tables.gemm)
    heads = (shape.heads // tp, shape.kv_heads // tp, shape.head_dim)
    prompt = _context(tables.context_attention, heads)
    step = _generation(tables.generation_attention, heads)
    reduce = _all_reduce(tables.all_reduce, tp)
    wide, own = shape.head_dim, shape.intermediate // tp

    def layer(tokens: float) -> float:
        return (
            product(tokens, (heads[0] + 2 * heads[1]) * wide, shape.hidden)
            + product(tokens, shape.hidden, heads[0] * wide)
            + product(tokens, 2 * own, shape.hidden)
            + product(tokens, shape.hidden, own)
            + 2 * reduce(tokens * shape.hidden * 2)
        )

    def linear(tokens: float) -> float:
        return shape.layers * layer(tokens) + assumed.step_overhead_s

    def attention(new: float, context: float) -> float:
        # The tables have prompts without a cached part: pairs of query and key, in proportion.
        whole = new + context
        pairs = new * context + new * (new + 1) / 2
        return shape.layers * prompt(whole) * pairs / (whole * (whole + 1) / 2)

    def decode(batch: float, context: float) -> float:
        return linear(batch) + shape.layers * step(batch, max(context, 1))

    kv = shape.kv_bytes_per_token()
    room = tp * gpu.memory_bytes * assumed.memory_share - 2 * parameters
    if room < kv:
        raise CanopyError(
            f"{model!r} needs {2 * parameters / 2**30:.0f} GiB for its weights, and {tp} x "
            f"{gpu.name} has no room for KV beside them; give more --tp"
        )
    host = tp * gpu.host_bytes_per_s * assumed.host_share
    return EngineProfile(
        name=name,
        model=model,
        device=f"{tp} x {gpu.name}",
        date=date,
        source=PUBLISHED,
        sources=tuple(sources),
        kv_bytes_per_token=kv,
        layers=shape.layers,
        prefill_tokens=PREFILL,
        prefill_linear_s=tuple(linear(n) for n in PREFILL),
        attention_new_tokens=PREFILL,
        attention_context_tokens=CONTEXT,
        attention_s=tuple(tuple(attention(n, c) for c in CONTEXT) for n in PREFILL),
        decode_batch=BATCH,
        decode_context_tokens=CONTEXT,
        decode_step_s=tuple(tuple(decode(b, c) for c in CONTEXT) for b in BATCH),
        host=Bandwidth(host, host),
        notes={
            "gpus": tp,
            "device_tokens": int(room // kv),
            "assumed": {n: getattr(assumed, n) for n in Assumptions.__slots__},
        },
    )


class _Grid:
    """Interpolates logarithms of a table between its points, and extrapolates along their slope."""

    def __init__(self, points: Mapping[tuple[float, ...], float], what: str) -> None:
        self._axes = [
            np.array(sorted({p[i] for p in points})) for i in range(len(next(iter(points))))
        ]
        values = np.full([len(axis) for axis in self._axes], math.nan)
        for point, seconds in points.items():
            at = tuple(int(np.searchsorted(axis, v)) for axis, v in zip(self._axes, point))
            values[at] = math.log(seconds)
        if np.isnan(values).all():
            raise CanopyError(f"the table of {what} is empty")
        # A few large points are missing where memory ran out: as the nearest smaller one, by size.
        for axis in range(values.ndim):
            values = _filled(values, axis)
        self._log = RegularGridInterpolator(
            [np.log(axis) for axis in self._axes], values, bounds_error=False, fill_value=None
        )

    def __call__(self, *at: float) -> float:
        return float(np.exp(self._log(np.log(np.array([at], float)))[0]))


def _filled(values: np.ndarray, axis: int) -> np.ndarray:
    """Missing values along ``axis`` taken on with the last slope."""
    moved = np.moveaxis(values, axis, 0).copy()
    for i in range(1, len(moved)):
        slope = moved[i - 1] - moved[i - 2] if i > 1 else np.zeros_like(moved[0])
        moved[i] = np.where(np.isnan(moved[i]), moved[i - 1] + slope, moved[i])
    return np.moveaxis(moved, 0, axis)


def _gemm(rows: Table) -> Any:
    points: dict[tuple[float, ...], float] = {
        (float(r["m"]), float(r["n"]), float(r["k"])): r["latency"] / 1000
        for r in rows
        if r["gemm_dtype"] == DTYPE
    }
    return _Grid(points, "matrix products") if points else _missing("matrix products", DTYPE)


def _context(rows: Table, heads: tuple[int, int, int]) -> Any:
    chosen = [r for r in _of(rows, heads) if r["batch_size"] == 1]
    points: dict[tuple[float, ...], float] = {
        (float(r["isl"]),): r["latency"] / 1000 for r in chosen
    }
    if not points:
        return _missing("attention of prompts", heads)
    grid, longest = _Grid(points, "attention of prompts"), max(points)[0]

    def seconds(tokens: float) -> float:
        if tokens <= longest:
            return grid(max(tokens, 1))
        return grid(longest) * (tokens / longest) ** 2

    return seconds


def _generation(rows: Table, heads: tuple[int, int, int]) -> Any:
    points: dict[tuple[float, ...], float] = {
        (float(r["batch_size"]), float(r["isl"] + r["step"])): r["latency"] / 1000
        for r in _of(rows, heads)
    }
    return _Grid(points, "attention of decode steps") if points else _missing("decode steps", heads)


def _all_reduce(rows: Table, tp: int) -> Any:
    if tp == 1:
        return lambda size: 0.0
    points: dict[tuple[float, ...], float] = {}
    for r in rows:
        if r["num_gpus"] == tp:
            at = (float(r["message_size"]),)
            points[at] = min(points.get(at, math.inf), r["latency"] / 1000)
    return _Grid(points, "all-reduce") if points else _missing("all-reduce", f"{tp} GPUs")


def _of(rows: Table, heads: tuple[int, int, int]) -> list[Mapping[str, Any]]:
    """Rows of these heads, KV heads and head size, in 16 bits and without a window; the first kernel."""
    found = [
        r
        for r in rows
        if (r["num_heads"], r["num_key_value_heads"], r["head_dim"]) == heads
        and r["attn_dtype"] == r["kv_cache_dtype"] == DTYPE
        and not r["window_size"]
    ]
    first = min((r["kernel_source"] for r in found), default=None)
    return [r for r in found if r["kernel_source"] == first]


def _missing(what: str, of: Any) -> Any:
    raise CanopyError(f"the tables have no {what} for {of}; take another --tp, system or model")
