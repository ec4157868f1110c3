"""Derived workloads: chat with long pauses, chat together with agents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from canopy_lab.trace.record import TraceRequest

BLOCK_TOKENS = 64
"""Block size of a mix, which is that of the agents' traces."""


def with_pauses(requests: Sequence[TraceRequest], times: float) -> list[TraceRequest]:
    """The same conversations, begun when they were, with ``times`` as long between turns."""
    starts: dict[str | None, float] = {}
    moved = []
    for request in requests:
        start = starts.setdefault(request.conversation, request.time_s)
        moved.append(replace(request, time_s=start + times * (request.time_s - start)))
    return sorted(moved, key=lambda r: r.time_s)


def merged(chat: Sequence[TraceRequest], agents: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Both, by time. Agents' sessions begin within the time of the chat; their gaps stay."""
    working = list(agents)
    starts: dict[str | None, float] = {}
    for request in working:
        starts.setdefault(request.user, request.time_s)
    first, last = min(starts.values()), max(starts.values())
    shrink = (chat[-1].time_s - chat[0].time_s) / max(last - first, 1e-9)
    first_id = 1 + max(block for request in working for block in request.blocks)
    moved = [
        replace(r, time_s=r.time_s - starts[r.user] + shrink * (starts[r.user] - first))
        for r in working
    ]
    talking = [
        replace(_in_blocks(r, first_id), time_s=r.time_s - chat[0].time_s, user=r.conversation)
        for r in chat
    ]
    return sorted([*talking, *moved], key=lambda r: r.time_s)


def _in_blocks(request: TraceRequest, first_id: int) -> TraceRequest:
    """Return the request in blocks of ``BLOCK_TOKENS``, with ids from ``first_id`` on."""
    parts = request.block_tokens // BLOCK_TOKENS
    blocks = [first_id + block * parts + part for block in request.blocks for part in range(parts)]
    whole = -(-request.input_tokens // BLOCK_TOKENS)
    return replace(request, blocks=tuple(blocks[:whole]), block_tokens=BLOCK_TOKENS)
