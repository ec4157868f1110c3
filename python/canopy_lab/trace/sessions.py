"""Sessions of a trace: the order of their turns, and the think times between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from canopy_lab.trace.record import TraceRequest


@dataclass(frozen=True, slots=True)
class TurnLinks:
    """Links of each request, indexed by its position in the trace."""

    session_start: list[int]
    """The first request of its session."""
    previous: list[int]
    """Request whose answer precedes it; -1 for the first of a session."""
    think_s: list[float]
    """Seconds from that answer; 0 for the first of a session."""


def turn_links(requests: Sequence[TraceRequest], think_cap_s: float | None = None) -> TurnLinks:
    """Link the turns of a trace in order of time.

    A turn follows the previous turn of its conversation. A sub-agent (conversation ``parent/child``)
    belongs to the parent's session and follows the parent's latest turn. The think time is
    ``TraceRequest.think_s`` if the trace has it, else the gap between the two arrivals, less the
    duration of the answer if known; at most ``think_cap_s``.
    """
    count = len(requests)
    links = TurnLinks(list(range(count)), [-1] * count, [0.0] * count)
    latest_by_name: dict[str, int] = {}
    times_s: list[float] = []
    answers_s: list[float] = []
    for index, request in enumerate(requests):
        times_s.append(request.time_s)
        answers_s.append(request.answer_s or 0.0)
        name = request.conversation
        if name is None:
            continue
        previous, think_s = latest_by_name.get(name, -1), request.think_s
        if previous < 0 and "/" in name:
            previous, think_s = latest_by_name.get(name.rsplit("/", 1)[0], -1), None
        latest_by_name[name] = index
        if previous < 0:
            continue
        links.previous[index] = previous
        links.session_start[index] = links.session_start[previous]
        if think_s is None:
            think_s = max(0.0, times_s[index] - times_s[previous] - answers_s[previous])
        links.think_s[index] = think_s if think_cap_s is None else min(think_s, think_cap_s)
    return links
