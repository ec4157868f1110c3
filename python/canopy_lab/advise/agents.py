"""Memory that holds agents' sessions: sessions x context, and what LRU hits with it, for agents alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from canopy_lab.trace.record import TraceRequest
from sglang_canopy.admission.agents import AFTER_TOOL_SUFFIX, SWIFT_S

IDLE_S = 300.0
"""Silence before a session's next turn, after which the session no longer needs its KV."""


@dataclass(frozen=True, slots=True)
class AgentMemory:
    """The KV of the agents' sessions."""

    sessions: int
    """Most sessions at a time; in the log, estimated if it is sampled."""
    tokens: float
    """Most tokens that they hold, in the server's tokens."""
    hit_ratio: float
    """Share of the agents' prompt tokens that LRU hits on the device."""
    hit_ratio_with: float
    """The same with memory for ``tokens``."""


def find_agent_turns(requests: Sequence[TraceRequest]) -> NDArray[np.bool_]:
    """Return which requests are agents'.

    A session is an agent's if most of its answers call a tool, or precede a tool's result or a turn
    within ``SWIFT_S``. This is the session gate's rule.
    """
    turns_by_session: dict[str, list[int]] = {}
    for index, request in enumerate(requests):
        if request.conversation is not None:
            turns_by_session.setdefault(request.conversation, []).append(index)
    is_agent_turn = np.zeros(len(requests), bool)
    for turns in turns_by_session.values():
        votes = [_looks_like_agent(requests[i], requests[j]) for i, j in pairwise(turns)]
        is_agent_turn[turns] = 2 * sum(votes) > len(votes)
    return is_agent_turn


def _looks_like_agent(answered: TraceRequest, following: TraceRequest) -> bool:
    gap_s = following.time_s - answered.time_s
    pause_s = gap_s if following.think_s is None else following.think_s
    calls_tool = answered.stop == "tool" or following.category.endswith(AFTER_TOOL_SUFFIX)
    return calls_tool or pause_s <= SWIFT_S


def peak_demand(turns: Sequence[TraceRequest]) -> tuple[int, int]:
    """Return the maximum number of sessions at a time, and of blocks that they hold at a time. A turn's
    blocks are held until the next turn, at most for ``IDLE_S``; without a next turn, for ``SWIFT_S``."""
    latest_by_session: dict[str | None, TraceRequest] = {}
    events = [(0.0, 0, 0)]
    for turn in turns:
        previous = latest_by_session.get(turn.conversation)
        if previous is not None:
            events.append((min(turn.time_s, previous.time_s + IDLE_S), -1, -len(previous.blocks)))
        events.append((turn.time_s, 1, len(turn.blocks)))
        latest_by_session[turn.conversation] = turn
    events += [(t.time_s + SWIFT_S, -1, -len(t.blocks)) for t in latest_by_session.values()]
    totals = np.cumsum(np.array([event[1:] for event in sorted(events)]), axis=0)
    return int(totals[:, 0].max()), int(totals[:, 1].max())
