"""TTFT and session times of one run, served or simulated."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_canopy.errors import CanopyError

WARM_UP_SHARE = 0.2
"""Share of the first requests, which fill the cache and are excluded."""
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
    def summarise(cls, values: np.ndarray) -> Spread:
        """Summarise one value or more."""
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
    """Latencies of one run.

    Every time counts from a request's due time instead of its sending. A request is due at its time
    in the trace or, in a closed loop, after the answer to the previous turn and the think time.
    """

    requests: int
    """Answered requests after the warm-up."""
    requests_per_s: float
    """Answers per second up to the last, including the warm-up."""
    ttft_s: Spread
    deciles: list[Decile]
    """Shortest prompts first."""
    sessions: int
    sessions_per_hour: float
    session_s: Spread
    """Seconds from a session's start to its last answer, with think time. Sessions begun in the
    warm-up are excluded, unless all were."""
    growth: float
    """Growth of the queue: seconds of TTFT per second (``saturation.py``)."""
    lag: float
    """Growth if overlapping sessions slow each other down: seconds by which waiting delays the end
    of nine tenths of the sessions, per second of their starts."""


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

    ``due_s`` and ``end_s`` are on one clock; ``ttft_s`` is from the due time to the first token.
    ``sessions`` names each request's session. Raises ``CanopyError`` without a request, or for an
    invalid share of the warm-up.
    """
    if not 0 <= warm_up_share < 1:
        raise CanopyError(f"the warm-up's share must be from 0 to below 1, got {warm_up_share!r}")
    due_s, ttft_s, end_s = (np.asarray(v, dtype=float) for v in (due_s, ttft_s, end_s))
    prompt = np.asarray(prompt_tokens)
    if not len(due_s):
        raise CanopyError("no request was answered, so there is no latency to report")
    order = np.argsort(due_s, kind="stable")
    measured = order[int(len(order) * warm_up_share) :]
    known: dict[Hashable, int] = {}
    session = np.array([known.setdefault(name, len(known)) for name in sessions])
    begin_s = np.full(len(known), np.inf)
    np.minimum.at(begin_s, session, due_s)
    finish_s = np.full(len(known), -np.inf)
    np.maximum.at(finish_s, session, end_s)
    waited_s = np.zeros(len(known))
    np.add.at(waited_s, session, ttft_s)
    is_measured = begin_s >= due_s[measured[0]]
    session_s = (finish_s - begin_s)[is_measured if is_measured.any() else slice(None)]
    span_s = max(float(end_s.max() - due_s.min()), 1e-9)
    return LatencyReport(
        requests=len(measured),
        requests_per_s=len(due_s) / span_s,
        ttft_s=Spread.summarise(ttft_s[measured]),
        deciles=_deciles(prompt[measured], ttft_s[measured]),
        sessions=len(known),
        sessions_per_hour=len(known) * 3600 / span_s,
        session_s=Spread.summarise(session_s),
        growth=growth(begin_s, waited_s),
        lag=lag(begin_s, finish_s, waited_s),
    )


def growth(begin_s: np.ndarray, waited_s: np.ndarray) -> float:
    """Return the growth of the wait over the run, in seconds per second.

    ``waited_s`` is each session's TTFT over all its turns; ``begin_s`` its start. The growth is the
    mean wait of the last fifth of sessions minus that of the second fifth, over the time between
    their mean starts (the first fifth fills the cache). If sessions arrive ``a`` times as fast as
    they are served, a session that arrives after ``t`` waits ``(a - 1) t``: the growth is
    ``a - 1``. 0 if too few sessions began.
    """
    order = np.argsort(begin_s, kind="stable")
    fifth = len(order) // 5
    if not fifth:
        return 0.0
    early, late = order[fifth : 2 * fifth], order[-fifth:]
    span_s = float(begin_s[late].mean() - begin_s[early].mean())
    if span_s <= 0:
        return 0.0
    return float(waited_s[late].mean() - waited_s[early].mean()) / span_s


def lag(begin_s: np.ndarray, end_s: np.ndarray, waited_s: np.ndarray) -> float:
    """Return the lag of answers behind arrivals, for sessions that overlap.

    The time at which nine tenths of the sessions have ended, minus that time without their waits
    (TTFT over all turns), over the time in which nine tenths began. If sessions arrive ``a`` times
    as fast as they are served, this is ``a - 1``, even if all of them share the delay. In that case
    the last wait is no longer than the first, and ``growth`` is 0.
    """
    ended_s, unhindered_s, began_s = (
        float(np.percentile(times, 90)) for times in (end_s, end_s - waited_s, begin_s)
    )
    return (ended_s - unhindered_s) / max(began_s - float(begin_s.min()), 1e-9)


def _deciles(prompt_tokens: np.ndarray, ttft_s: np.ndarray) -> list[Decile]:
    deciles = []
    for part in np.array_split(np.argsort(prompt_tokens, kind="stable"), DECILES):
        if len(part):
            lengths = prompt_tokens[part]
            deciles.append(
                Decile(int(lengths[0]), int(lengths[-1]), len(part), Spread.summarise(ttft_s[part]))
            )
    return deciles
