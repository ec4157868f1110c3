"""KV of each request (Section 3.5, Figure 21)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from canopy_lab.characterize.observe import Observation
from canopy_lab.sim.model import ModelShape


@dataclass(frozen=True, slots=True)
class Sizes:
    """Quantiles over requests, prompt and output together."""

    name: str
    requests: int
    mean_tokens: float
    p50_tokens: float
    p90_tokens: float
    p99_tokens: float
    mean_bytes: float
    p50_bytes: float
    p90_bytes: float
    p99_bytes: float


@dataclass(frozen=True, slots=True)
class Footprint:
    model: str
    bytes_per_token: int
    rows: tuple[Sizes, ...]
    """All requests; also first and later turns if the trace has turns."""
    tokens: tuple[float, ...]
    share_below: tuple[tuple[float, ...], ...]
    """For each row: share of its requests with at most ``tokens`` tokens."""


def footprint(seen: Observation, model: ModelShape, name: str) -> Footprint:
    """Compute the footprint for ``model``. ``name``: the model's name in the report."""
    tokens = seen.input_tokens + seen.output_tokens
    weight = model.kv_bytes_per_token()
    groups = [("all requests", np.ones(len(tokens), bool))]
    if seen.has_turns:
        groups += [("first turns", seen.turn <= 1), ("later turns", seen.turn > 1)]
    marks = np.geomspace(max(float(tokens.min()), 1.0), max(float(tokens.max()), 2.0), 80)
    rows, below = [], []
    for label, which in groups:
        mine = np.sort(tokens[which])
        mean = float(mine.mean())
        p50, p90, p99 = (float(v) for v in np.quantile(mine, (0.5, 0.9, 0.99)))
        sizes = (mean, p50, p90, p99)
        rows.append(Sizes(label, len(mine), *sizes, *(s * weight for s in sizes)))
        below.append(tuple((np.searchsorted(mine, marks, "right") / len(mine)).tolist()))
    return Footprint(name, weight, tuple(rows), tuple(marks.tolist()), tuple(below))
