"""Build a multi-tenant trace from single conversations.

Public agentic traces are one conversation per file, each with a clock and block ids of its own. An
overlay chooses some, starts each at a random moment of a window and merges their requests by
time. Agents of one kind begin with the same tools and the same system prompt, so agents with the
same model and the same numbers of tokens of both share those blocks (``shared_heads.py``); every
other block stays unique to its conversation.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared_heads import SharedHeads

from canopy_lab.trace import agentic, lines
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError


@dataclass(frozen=True, slots=True)
class ConversationStart:
    """When a conversation of an overlay starts, the number of its file in the archive, and of its copy."""

    time_s: float
    file_index: int
    copy_index: int


def choose_starts(
    file_count: int, count: int, window_s: float, seed: int
) -> list[ConversationStart]:
    """Draw when ``count`` conversations, of ``file_count`` files, start within ``window_s``; sorted by time.

    No file is chosen again before all are chosen once. Raises ``CanopyError``.
    """
    if count < 1:
        raise CanopyError(f"conversations must be 1 or more, got {count}")
    if not 0 < window_s < float("inf"):
        raise CanopyError(f"the window must be a positive number of seconds, got {window_s}")
    rng = random.Random(seed)
    file_order = list(range(file_count))
    chosen: list[tuple[int, int]] = []
    for copy_index in itertools.count():
        rng.shuffle(file_order)
        chosen += [(file, copy_index) for file in file_order[: count - len(chosen)]]
        if len(chosen) == count:
            break
    # Microseconds: a start prints and reads back as itself.
    starts = [ConversationStart(round(rng.uniform(0, window_s), 6), *pair) for pair in chosen]
    return sorted(starts, key=lambda s: (s.time_s, s.file_index, s.copy_index))


def overlay(
    archive: Path | str, conversations: int, window_s: float, seed: int, *, skip_bad: int = 0
) -> Iterator[TraceRequest]:
    """Yield the merged requests by time; equal arguments give equal requests.

    ``archive`` is anything of conversations that the agentic reader takes. Sub-agents are
    included, as conversations of their own with the ``user`` of their parent. Memory: the text
    of the chosen conversations, and those running at a moment. Raises ``CanopyError``.
    """
    archive = lines.readable_path(archive)
    tolerance = lines.Tolerance(archive, skip_bad)
    file_count = sum(1 for _ in agentic.conversation_files(archive))
    if file_count == 0:
        raise CanopyError(f"{str(archive)!r} holds no conversation (.json)")
    starts = choose_starts(file_count, conversations, window_s, seed)
    chosen_files = {s.file_index for s in starts}
    texts = {i: d for i, d in enumerate(agentic.conversation_files(archive)) if i in chosen_files}
    yield from _merge(starts, texts, tolerance, SharedHeads())
    tolerance.report()


def _merge(
    starts: list[ConversationStart],
    texts: dict[int, tuple[str, bytes]],
    tolerance: lines.Tolerance,
    heads: SharedHeads,
) -> Iterator[TraceRequest]:
    running: list[tuple[float, int, TraceRequest, Iterator[TraceRequest]]] = []
    first_free_id, shared_ids = 0, agentic.SharedIds()
    for order, start in enumerate([*starts, None]):
        while running and (start is None or running[0][0] < start.time_s):
            _, tie_breaker, request, requests = running[0]
            yield request
            next_request = next(requests, None)
            if next_request is None:
                heapq.heappop(running)
            else:
                following = (next_request.time_s, tie_breaker, next_request, requests)
                heapq.heapreplace(running, following)
        if start is None:
            return
        name, text = texts[start.file_index]
        try:
            record = lines.parse_object(text)
            conversation = agentic.parse_conversation(record, name, start.file_index + 1)
        except lines.BadLine as error:
            tolerance.count_bad(start.file_index + 1, str(error), name=name)
            continue
        if conversation.source is None:
            requests = _place_private(conversation, start, first_free_id, heads)
            first_free_id += conversation.max_block_id + 1
        else:
            requests = _place_shared(conversation, start, shared_ids)
        first_request = next(requests)
        heapq.heappush(running, (first_request.time_s, order, first_request, requests))


def _place_private(
    conversation: agentic.Conversation, start: ConversationStart, first_id: int, heads: SharedHeads
) -> Iterator[TraceRequest]:
    # One int object a block, shared by all requests: a long conversation repeats them by the
    # thousand.
    ids = list(range(first_id, first_id + conversation.max_block_id + 1))
    heads.share(conversation, ids)
    new_id = ids.__getitem__
    copy_suffix = f"#{start.copy_index + 1}" if start.copy_index else ""
    for request in conversation.requests:
        yield replace(
            agentic.shift(request, start.time_s, 0, copy_suffix),
            blocks=tuple(map(new_id, request.blocks)),
        )


def _place_shared(
    conversation: agentic.Conversation, start: ConversationStart, ids: agentic.SharedIds
) -> Iterator[TraceRequest]:
    """Requests whose block ids are valid in all sessions of their user; copies have users of their
    own."""
    copy_suffix = f"#{start.copy_index + 1}" if start.copy_index else ""
    owned_conversation = replace(conversation, source=f"{conversation.source}{copy_suffix}")
    first_id = ids.first_id(owned_conversation, 0)
    for request in conversation.requests:
        yield agentic.shift(request, start.time_s, first_id, copy_suffix)


def flat_line(request: TraceRequest) -> str:
    """Return ``request`` as a line of an overlay, which the agentic reader reads back."""
    record: dict[str, Any] = {
        "t": request.time_s,
        "in": request.input_tokens,
        "out": request.output_tokens,
        "stop": request.stop or "",
        "block_size": request.block_tokens,
        "category": request.category,
        "turn": request.turn,
    }
    if request.conversation is not None:
        record["conversation"] = request.conversation
    if request.user is not None:
        record["user"] = request.user
    optional: dict[str, Any] = {
        "think_time": request.think_s,
        "api_time": request.answer_s,
        "model": request.model,
        "tool_tokens": request.tool_tokens or None,
        "system_tokens": request.system_tokens or None,
    }
    record.update((name, value) for name, value in optional.items() if value is not None)
    record["hash_ids"] = request.blocks
    return json.dumps(record, separators=(",", ":"))
