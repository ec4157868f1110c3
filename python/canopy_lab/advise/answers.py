"""Advice as plain data, for a page or a terminal."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from canopy_lab.advise.agents import AgentMemory
from canopy_lab.advise.costs import ArmCost
from canopy_lab.advise.decide import Gain, Recommendation
from sglang_canopy import __version__


@dataclass(frozen=True, slots=True)
class ArmRow:
    """One arm at the given capacity."""

    gain: Gain
    cost: ArmCost
    gpu_s_saved_per_hour: float
    """Prefill seconds saved per hour of the log, against the baseline."""
    prefill_change: float
    """Change of the prefill seconds against the baseline, as a share."""
    kind: str
    """``baseline``, ``policy``, ``placebo``, ``hints`` or ``bound``."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A device with memory below it, under the baseline and under the advised policy."""

    label: str
    tokens: float
    """Capacity of the largest tier, which has copies of the tiers above it."""
    lru: Gain
    lru_cost: ArmCost
    advised: Gain
    advised_cost: ArmCost
    gpu_s_saved_per_hour: float
    """Savings of ``advised`` against the device alone under the baseline."""


@dataclass(frozen=True, slots=True)
class HitCurve:
    """Token hit ratio by capacity, in the server's tokens."""

    tokens: tuple[float, ...]
    hit_ratio: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Advice:
    """Everything the page shows."""

    decision: Recommendation
    sample: dict[str, Any]
    """Sizes of log and sample (``LogSample`` without its requests)."""
    profile: str
    profile_source: str
    kv_bytes_per_token: int
    capacity_tokens: float
    capacity_from: str
    """``given``, ``log`` (the server's), ``ranks`` (sum of DP ranks) or ``curve`` (``LOST_POINTS``)."""
    repeats: float
    """Share of the prompt tokens that an unbounded cache would hit."""
    distinct_tokens: float
    """Tokens in an unbounded cache after the log."""
    lru: HitCurve
    rows: tuple[ArmRow, ...]
    others: dict[str, HitCurve]
    """LRU as in SGLang, canopy-lru, wa and the bound at several capacities."""
    tiers: tuple[Tier, ...]
    agents: AgentMemory | None
    """``None`` without agents."""
    prefill_busy: float
    """Share of one GPU's time that prefill takes under the baseline."""
    clusters: int
    cluster_kind: str
    scaled_prompts: float
    """Mean prompts that fit into the scaled-down cache."""
    placebo_points: float
    """Gain of ``wa`` over the baseline with labels of other requests."""
    too_long: float
    """Share of the prompts that are larger than the capacity."""

    def as_json(self) -> dict[str, Any]:
        return {"canopy_version": __version__, **asdict(self)}
