"""What advice is: plain data that a page or a terminal shows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from canopy_lab.advise.costs import Cost
from canopy_lab.advise.decide import Decision, Gain
from canopy_lab.advise.misses import Misses
from sglang_canopy import __version__


@dataclass(frozen=True, slots=True)
class Row:
    """One arm at the capacity asked about."""

    gain: Gain
    cost: Cost
    gpu_s_saved_per_hour: float
    """Of prefill, in an hour of the log, against the baseline."""
    prefill_change: float
    """Prefill seconds against the baseline, as a share."""
    kind: str
    """``baseline``, ``policy``, ``placebo``, ``hints`` or ``bound``."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A device with memory below it, under the baseline's policy and under the one advised."""

    label: str
    tokens: float
    """Of the largest tier: the tiers above it hold copies of what is there."""
    lru: Gain
    lru_cost: Cost
    advised: Gain
    advised_cost: Cost
    gpu_s_saved_per_hour: float
    """Of ``advised`` against the device alone under the baseline."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Token hit ratio by capacity, both as the server counts tokens."""

    tokens: tuple[float, ...]
    hit_ratio: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Advice:
    """Everything the page shows."""

    decision: Decision
    sample: dict[str, Any]
    """Sizes of log and sample (``Sample`` without its requests)."""
    profile: str
    profile_source: str
    kv_bytes_per_token: int
    capacity_tokens: float
    capacity_from: str
    """``given``, ``log`` (of the server), ``ranks`` (the sum of its DP ranks), or ``curve``: where LRU has lost ``LOST_POINTS``."""
    repeats: float
    """Share of the prompt tokens that an endless cache would hit."""
    distinct_tokens: float
    """What an endless cache would hold."""
    lru: Curve
    rows: tuple[Row, ...]
    others: dict[str, Curve]
    """LRU as in SGLang, canopy-lru, wa and the bound at several capacities."""
    tiers: tuple[Tier, ...]
    prefill_busy: float
    """Share of one GPU's time that prefill takes under the baseline."""
    servers: int
    """That share the requests, in the queue."""
    servers_given: bool
    clusters: int
    cluster_kind: str
    scaled_prompts: float
    """Mean prompts that fit into the simulated cache, scaled down with the sample."""
    placebo_points: float
    """Gain of ``wa`` with another request's labels over the baseline, at the capacity."""
    too_long: float
    """Share of the prompts that the capacity does not hold."""
    misses: Misses
    """Why the baseline misses at the capacity."""

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"canopy_version": __version__, **asdict(self)}
