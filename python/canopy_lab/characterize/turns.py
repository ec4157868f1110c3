"""Length of conversations, and probability of a next turn (ATC 2025, section 3.3, figures 9 to 11)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from canopy_lab.characterize.observe import Observation

MAX_TURN_CATEGORIES = 10
MIN_REQUESTS = 20
"""Minimum requests of a category in a window."""


@dataclass(frozen=True, slots=True)
class NextTurn:
    """One category (type and turn) of requests."""

    name: str
    requests: int
    probability: float
    """Share of the requests that were followed by another turn."""
    over_time: tuple[float, ...]
    """Probability by window; NaN for fewer than ``MIN_REQUESTS`` requests."""


@dataclass(frozen=True, slots=True)
class Turns:
    """Turns of the requests, counted as in the paper: one number per request."""

    conversations: int
    first_turn_share: float
    p50: float
    p90: float
    p99: float
    longest: int
    turn: tuple[int, ...]
    share_beyond: tuple[float, ...]
    """Share of the requests whose turn number is above ``turn``."""
    pause_p50_s: float
    pause_p90_s: float
    window_s: float
    window_start_s: tuple[float, ...]
    next_turn: tuple[NextTurn, ...]
    """Categories with the most requests, if they have enough in some window."""
    first_next: float
    later_next: float
    """Probability of a next turn, after first turns and after later ones."""
    drift: float
    """Mean absolute change of a category's probability between consecutive windows; NaN without any."""


def measure_turns(observation: Observation, windows: int = 12) -> Turns | None:
    """Compute turns, in at most ``windows`` windows; ``None`` if the trace has no turns."""
    if not observation.has_turns:
        return None
    has_next = observation.next_request >= 0
    pauses_s = observation.time_s[observation.next_request[has_next]] - observation.time_s[has_next]
    p50, p90 = np.quantile(pauses_s, (0.5, 0.9)) if len(pauses_s) else (0.0, 0.0)
    # At most a quarter of the trace, so that a trace with long pauses still has a result.
    tail_s = min(float(p90), 0.25 * observation.span_s)
    start_s, end_s = float(observation.time_s[0]), float(observation.time_s[-1]) - tail_s
    is_settled = observation.time_s <= end_s
    largest_category = int(np.bincount(observation.category[is_settled]).max(initial=0))
    windows = max(1, min(windows, largest_category // (2 * MIN_REQUESTS)))
    width_s = max((end_s - start_s) / windows, 1e-9)
    window_numbers = np.minimum(((observation.time_s - start_s) / width_s).astype(int), windows - 1)
    turns = _next_turns(observation, is_settled, window_numbers, windows)
    changes = (
        np.concatenate([np.abs(np.diff(t.over_time)) for t in turns]) if turns else np.empty(0)
    )
    changes = changes[~np.isnan(changes)]
    turn_numbers = np.unique(np.geomspace(1, max(int(observation.turn.max()), 2), 60).astype(int))
    sorted_turns = np.sort(observation.turn)
    beyond = 1.0 - np.searchsorted(sorted_turns, turn_numbers, "right") / len(sorted_turns)
    is_first, is_later = is_settled & (observation.turn == 1), is_settled & (observation.turn > 1)
    return Turns(
        conversations=int((np.unique(observation.conversation) >= 0).sum())
        if observation.has_conversations
        else int((observation.turn == 1).sum()),
        first_turn_share=float((observation.turn == 1).mean()),
        p50=float(np.quantile(observation.turn, 0.5)),
        p90=float(np.quantile(observation.turn, 0.9)),
        p99=float(np.quantile(observation.turn, 0.99)),
        longest=int(observation.turn.max()),
        turn=tuple(turn_numbers.tolist()),
        share_beyond=tuple(beyond.tolist()),
        pause_p50_s=float(p50),
        pause_p90_s=float(p90),
        window_s=width_s,
        window_start_s=tuple(start_s + width_s * i for i in range(windows)),
        next_turn=tuple(turns),
        first_next=float(has_next[is_first].mean()) if is_first.any() else 0.0,
        later_next=float(has_next[is_later].mean()) if is_later.any() else 0.0,
        drift=float(changes.mean()) if len(changes) else math.nan,
    )


def _next_turns(
    observation: Observation, is_settled: np.ndarray, window_numbers: np.ndarray, windows: int
) -> list[NextTurn]:
    """Return the largest categories of the settled requests; ``window_numbers``: each request's window."""
    has_next, category, next_turns = observation.next_request >= 0, observation.category, []
    codes, counts = np.unique(category[is_settled], return_counts=True)
    for code in codes[np.argsort(-counts, kind="stable")][:MAX_TURN_CATEGORIES]:
        in_category = is_settled & (category == code)
        requests = np.bincount(window_numbers[in_category], minlength=windows)
        continued = np.bincount(window_numbers[in_category], has_next[in_category], windows)
        has_enough = requests >= MIN_REQUESTS
        if not has_enough.any():
            continue
        shares = np.divide(continued, requests, out=np.full(windows, np.nan), where=has_enough)
        name, probability = observation.category_name(int(code)), has_next[in_category].mean()
        over_time = tuple(shares.tolist())
        next_turns.append(NextTurn(name, int(in_category.sum()), float(probability), over_time))
    return next_turns
