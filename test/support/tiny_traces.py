"""Tiny traces with answers a hand can work out."""

from collections.abc import Sequence
from typing import Any

from canopy_lab.trace.record import TraceRequest
from support.trace_samples import record


def request_of(
    time_s: float,
    blocks: Sequence[int],
    *,
    category: str = "text",
    conversation: str | None = None,
    output_tokens: int = 10,
    **options: Any,
) -> TraceRequest:
    """A request for whole blocks of 10 tokens."""
    fields = {"category": category, "conversation": conversation, "output_tokens": output_tokens}
    return record(time_s, blocks, **fields, **options)


THREE_CONVERSATIONS = [
    # Conversation a grows twice; b shares block 1 with it; c shares nothing.
    request_of(0.0, [1, 2], conversation="a", user="u"),
    request_of(10.0, [1, 3], conversation="b", user="v", category="file"),
    request_of(30.0, [1, 2, 4], conversation="a", user="u", turn=2),
    request_of(40.0, [9], conversation="c", user="v"),
    request_of(100.0, [1, 2, 4, 5], conversation="a", user="u", turn=3),
]
"""12 block accesses, 6 distinct; hits: 0, 1 (b on 1), 2 (1 and 2), 0, 3 (1, 2, 4)."""
