"""TTFT and session times of one run, served or simulated."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sglang_canopy.errors import CanopyError

WARM_UP_SHARE = 0.2
"""Share of the requests, the first that were due, that fill the cache and are not counted."""
DECILES = 10


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds over requests or sessions."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: np.ndarray) -> Spread:
        """Of one value or more."""
        p50, p95, p99 = (float(p) for p in np.percentile(values, (50, 95, 99)))
        return cls(float(values.mean()), p50, p95, p99, float(values.max()))


@dataclass(frozen=True, slots=True)
class Decile:
    """A tenth of the requests, by the length of their prompts."""

    shortest_tokens: int
    longest_tokens: int
    requests: int
    ttft_s: Spread


@dataclass(frozen=True, slots=True)
class LatencyReport:
    """What one run gave. Every time counts from when a request was due, not from when it was
    sent: a request is due at its time in the trace, or, in a closed loop, after the answer to
    the turn before it and the time to think."""

    requests: int
    """Answered, and counted: those after the warm-up."""
    requests_per_s: float
    """Answered from the first that was due to the last answer, the warm-up included."""
    ttft_s: Spread
    deciles: tuple[Decile, ...]
    """Shortest prompts first."""
    sessions: int
    """All of the run."""
    sessions_per_hour: float
    session_s: Spread
    """From a session's first request to its last answer, time to think included; sessions that
    began in the warm-up are left out, unless none is left."""
    growth: float
    """By how much the queue grows: seconds of TTFT a second (``saturation.py``)."""
    lag: float
    """The same of sessions that slow each other down, early ones as well as late ones: by how
    many seconds waiting delays the end of nine tenths of them, a second of their beginnings."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "deciles": [asdict(decile) for decile in self.deciles]}


def latency_report(
    due_s: Sequence[float] | np.ndarray,
    ttft_s: Sequence[float] | np.ndarray,
    end_s: Sequence[float] | np.ndarray,
    prompt_tokens: Sequence[int] | np.ndarray,
    sessions: Sequence[Hashable],
    *,
    warm_up_share: float = WARM_UP_SHARE,
) -> LatencyReport:
    """Summarise answered requests, one entry each, in any order.

    ``due_s`` and ``end_s`` on one clock, ``ttft_s`` from due to the first token. ``sessions``
    names each request's session. Raises ``CanopyError`` without a request, or for a share of the
    warm-up that leaves none.
    """
    if not 0 <= warm_up_share < 1:
        raise CanopyError(f"the warm-up's share must be from 0 to below 1, got {warm_up_share!r}")
    due, ttft, end = (np.asarray(v, dtype=float) for v in (due_s, ttft_s, end_s))
    prompt = np.asarray(prompt_tokens)
    if not len(due):
        raise CanopyError("no request was answered, so there is no latency to report")
    order = np.argsort(due, kind="stable")
    counted = order[int(len(order) * warm_up_share) :]
    numbers: dict[Hashable, int] = {}
    number = np.array([numbers.setdefault(name, len(numbers)) for name in sessions])
    begin = np.full(len(numbers), np.inf)
    np.minimum.at(begin, number, due)
    last = np.full(len(numbers), -np.inf)
    np.maximum.at(last, number, end)
    waited = np.zeros(len(numbers))
    np.add.at(waited, number, ttft)
    later = begin >= due[counted[0]]
    taken = (last - begin)[later] if later.any() else last - begin
    span = max(float(end.max() - due.min()), 1e-9)
    return LatencyReport(
        requests=len(counted),
        requests_per_s=len(due) / span,
        ttft_s=Spread.of(ttft[counted]),
        deciles=_deciles(prompt[counted], ttft[counted]),
        sessions=len(numbers),
        sessions_per_hour=len(numbers) * 3600 / span,
        session_s=Spread.of(taken),
        growth=growth(begin, waited),
        lag=lag(begin, last, waited),
    )


def growth(begin_s: np.ndarray, waited_s: np.ndarray) -> float:
    """By how many seconds a second the wait grows over the run.

    ``waited_s`` of each session, in TTFT over all its turns, and when it began. The mean of the
    last fifth that began, less that of the second fifth (the first fills the cache), over the
    time between the means of their beginnings. If sessions come ``a`` times as fast as they are
    served, the wait of one that comes after ``t`` is ``(a - 1) t``: the growth is ``a - 1``.
    0 where too few sessions began to tell.
    """
    order = np.argsort(begin_s, kind="stable")
    fifth = len(order) // 5
    if not fifth:
        return 0.0
    early, late = order[fifth : 2 * fifth], order[-fifth:]
    span = float(begin_s[late].mean() - begin_s[early].mean())
    if span <= 0:
        return 0.0
    return float(waited_s[late].mean() - waited_s[early].mean()) / span


def lag(begin_s: np.ndarray, end_s: np.ndarray, waited_s: np.ndarray) -> float:
    """By how much the answers fall behind the arrivals, of sessions that overlap.

    When nine tenths of the sessions have ended, less when nine tenths would have ended without
    their waits (TTFT over all turns), over the time in which nine tenths began. If sessions come
    ``a`` times as fast as they are served this is ``a - 1``, even where all of them share the
    delay, so that the last wait no longer than the first and ``growth`` sees nothing.
    """
    ended, unhindered, began = (
        float(np.percentile(times, 90)) for times in (end_s, end_s - waited_s, begin_s)
    )
    return (ended - unhindered) / max(began - float(begin_s.min()), 1e-9)


def _deciles(prompt: np.ndarray, ttft: np.ndarray) -> tuple[Decile, ...]:
    made = []
    for part in np.array_split(np.argsort(prompt, kind="stable"), DECILES):
        if len(part):
            lengths = prompt[part]
            made.append(Decile(int(lengths[0]), int(lengths[-1]), len(part), Spread.of(ttft[part])))
    return tuple(made)
