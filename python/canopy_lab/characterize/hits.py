"""Ideal hit ratios, over time and by group (Section 3.2, Figures 4 and 5)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from canopy_lab.characterize.observe import Observation


@dataclass(frozen=True, slots=True)
class GroupShare:
    """One group's shares of all requests."""

    name: str
    requests: float
    """Share of the requests, 0 to 1; the next two fields also."""
    blocks: float
    hits: float
    hit_ratio: float
    """Hits as a share of the group's own blocks."""


@dataclass(frozen=True, slots=True)
class IdealHits:
    """Hits of an unbounded cache. Ratios from 0 to 1."""

    block_hit_ratio: float
    token_hit_ratio: float
    requests_with_a_hit: float
    stranded: float
    """Share of blocks seen before but after a miss: unusable."""
    turns: tuple[GroupShare, ...]
    """First turns and later turns; empty if the trace has no turns."""
    kinds: tuple[GroupShare, ...]
    """Request types, most requests first; empty if there is only one."""
    window_s: float
    window_start_s: tuple[float, ...]
    window_hit_ratio: tuple[float, ...]
    """NaN for a window without requests."""


def measure_ideal_hits(observation: Observation, windows: int = 24) -> IdealHits:
    blocks, hits = observation.blocks, observation.hits
    hit_tokens = np.minimum(hits * observation.block_tokens, observation.input_tokens)
    is_first = observation.turn <= 1
    turn_masks = {"first turns": is_first, "later turns": ~is_first}
    turns = tuple(_share(observation, *group) for group in turn_masks.items())
    kinds: list[GroupShare] = []
    if len(observation.labels) > 1:
        for i, name in enumerate(observation.labels):
            kinds.append(_share(observation, name, observation.kind == i))
        kinds.sort(key=lambda s: -s.requests)
    start_s = float(observation.time_s[0])
    window_s = max(observation.span_s / windows, 1e-9)
    window = np.minimum(((observation.time_s - start_s) / window_s).astype(int), windows - 1)
    blocks_by_window = np.bincount(window, blocks, windows)
    hits_by_window = np.bincount(window, hits, windows)
    ratios = np.full(windows, np.nan)
    np.divide(hits_by_window, blocks_by_window, out=ratios, where=blocks_by_window > 0)
    return IdealHits(
        block_hit_ratio=_ratio(hits.sum(), blocks.sum()),
        token_hit_ratio=_ratio(hit_tokens.sum(), observation.input_tokens.sum()),
        requests_with_a_hit=float((hits > 0).mean()),
        stranded=_ratio(observation.stranded, blocks.sum()),
        turns=turns if observation.has_turns else (),
        kinds=tuple(kinds),
        window_s=window_s,
        window_start_s=tuple(start_s + window_s * i for i in range(windows)),
        window_hit_ratio=tuple(ratios.tolist()),
    )


def _share(observation: Observation, name: str, is_in_group: np.ndarray) -> GroupShare:
    blocks, hits = observation.blocks[is_in_group].sum(), observation.hits[is_in_group].sum()
    return GroupShare(
        name,
        requests=float(is_in_group.mean()),
        blocks=_ratio(blocks, observation.blocks.sum()),
        hits=_ratio(hits, observation.hits.sum()),
        hit_ratio=_ratio(hits, blocks),
    )


def _ratio(part: float, whole: float) -> float:
    return float(part) / float(whole) if whole else 0.0
