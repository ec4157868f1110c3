"""Tiny traces with answers a hand can work out."""

from collections.abc import Sequence
from typing import Any

from canopy_lab.trace.record import TraceRequest
from support.trace_samples import record


def ask(
    time_s: float,
    blocks: Sequence[int],
    *,
    kind: str = "text",
    talk: str | None = None,
    output: int = 10,
    **more: Any,
) -> TraceRequest:
    """A request for whole blocks of 10 tokens."""
    fields = {"category": kind, "conversation": talk, "output_tokens": output, **more}
    return record(time_s, blocks, **fields)


TWO_TALKS = [
    # Conversation a grows twice; b shares block 1 with it; c shares nothing.
    ask(0.0, [1, 2], talk="a", user="u"),
    ask(10.0, [1, 3], talk="b", user="v", kind="file"),
    ask(30.0, [1, 2, 4], talk="a", user="u", turn=2),
    ask(40.0, [9], talk="c", user="v"),
    ask(100.0, [1, 2, 4, 5], talk="a", user="u", turn=3),
]
"""12 block accesses, 6 distinct; hits: 0, 1 (b on 1), 2 (1 and 2), 0, 3 (1, 2, 4)."""
