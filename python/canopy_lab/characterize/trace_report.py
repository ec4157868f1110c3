"""Compute all answers, as one report that can be drawn or written as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from canopy_lab.characterize.capacity import Capacity, measure_capacity
from canopy_lab.characterize.hits import IdealHits, measure_ideal_hits
from canopy_lab.characterize.observe import Observation, observe
from canopy_lab.characterize.reuse_time import ReuseTimes, measure_reuse_times
from canopy_lab.characterize.skew import Skew, measure_skew
from canopy_lab.characterize.turns import Turns, measure_turns
from canopy_lab.sim.model import load_model_shape
from canopy_lab.sim.stack import lru_curve
from canopy_lab.trace.open import open_trace
from canopy_lab.trace.record import TraceRequest
from sglang_canopy import __version__


@dataclass(frozen=True, slots=True)
class Overview:
    """Key figures of the trace."""

    path: str
    format: str
    requests: int
    span_s: float
    requests_per_s: float
    busiest_minute_per_s: float
    block_tokens: int
    distinct_blocks: int
    block_accesses: int
    input_p50: float
    input_mean: float
    output_mean: float
    kinds: tuple[str, ...]


@dataclass(slots=True)
class TraceReport:
    """All answers; ``None`` for one that the trace cannot give, with its reason in ``absent``."""

    overview: Overview
    hits: IdealHits | None = None
    skew: Skew | None = None
    turns: Turns | None = None
    reuse: ReuseTimes | None = None
    capacity: Capacity | None = None
    notes: list[str] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return plain data; NaN becomes ``null``."""
        plain = {f.name: _to_plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return {"canopy_version": __version__, **plain}


TrackProgress = Callable[[Iterator[TraceRequest]], Iterable[TraceRequest]]
"""Passes a trace's requests on, and may show the progress."""


def characterize(
    path: Path,
    format: str,
    *,
    model: str = "qwen2.5-7b",
    skip_bad: int = 0,
    track: TrackProgress = iter,
) -> TraceReport:
    """Read a trace once or twice and compute every answer that it allows.

    ``model`` is a preset of ``sim.model`` or a Hugging Face ``config.json``. Raises ``CanopyError``
    for faults that a user can correct.
    """
    shape = load_model_shape(model)
    observation = observe(track(open_trace(path, format, skip_bad=skip_bad)))
    accesses = int(observation.blocks.sum())
    has_reuse = bool(observation.hits.any())
    report = TraceReport(_overview(path, format, observation, accesses))
    report.turns = measure_turns(observation)
    if report.turns is None:
        report.absent["turns"] = "the trace has no second turns and no ids that join requests"
    elif format == "mooncake" or format.startswith("sglang"):
        report.notes.append(
            "The trace names no conversations: turns are inferred from prompts that extend "
            "an earlier one."
        )
    if not has_reuse:
        report.absent["reuse"] = "no block is ever used twice, so any policy will do"
        return report
    report.hits = measure_ideal_hits(observation)
    report.skew = measure_skew(observation)
    if not observation.has_users:
        report.absent["users"] = "the trace names no users"
    if not observation.has_conversations:
        report.absent["conversations"] = "the trace names no conversations"
    if len(observation.labels) == 1:
        report.absent["kinds"] = "all requests are of one type"
    report.reuse = measure_reuse_times(observation)
    lru = lru_curve(track(open_trace(path, format, skip_bad=skip_bad)))
    kv_bytes = shape.kv_bytes_per_token()
    report.capacity = measure_capacity(observation, lru, observation.block_tokens * kv_bytes)
    return report


def _overview(path: Path, format: str, observation: Observation, accesses: int) -> Overview:
    by_minute = np.bincount(((observation.time_s - observation.time_s[0]) / 60.0).astype(int))
    quantile = np.quantile
    return Overview(
        path=path.name,
        format=format,
        requests=observation.requests,
        span_s=observation.span_s,
        requests_per_s=observation.requests / observation.span_s if observation.span_s else 0.0,
        busiest_minute_per_s=float(by_minute.max()) / 60.0,
        block_tokens=observation.block_tokens,
        distinct_blocks=observation.distinct_blocks,
        block_accesses=accesses,
        input_p50=float(quantile(observation.input_tokens, 0.5)),
        input_mean=float(observation.input_tokens.mean()),
        output_mean=float(observation.output_tokens.mean()),
        kinds=tuple(observation.labels),
    )


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {k: _to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
