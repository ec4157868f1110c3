"""A trace split into equal parts, as a load balancer would split it over instances.

It is for traces with more traffic than the instances can serve. Drawing requests at random would thin
out bursts, and stretching times would change return times. TraceSplitter (EuroSys 2021), which "KVCache
Cache in the Wild" (Section 4.3) scales its traces with, gives every request to the part with the
least work, so that each part has the temporal pattern of the whole. Conversations stay together here:
a split one would reuse nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from canopy_lab.trace.infer import ConversationIndex
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError


def one_part(trace: Iterable[TraceRequest], parts: int, part: int = 0) -> Iterator[TraceRequest]:
    """Yield the requests of ``trace`` for part ``part`` (from 0) of ``parts`` equal parts.

    A conversation is assigned at its start to the part with the least work so far (prompt and output
    tokens), the first of equals. If the trace names no conversations, they are inferred from the
    blocks. Memory: a number per conversation; if inferred, two per distinct block.
    Raises ``CanopyError``.
    """
    if not (isinstance(parts, int) and parts >= 1 and 0 <= part < parts):
        raise CanopyError(
            f"a trace is split into 1 part or more, and part is from 0 to parts - 1; got part {part!r} "
            f"of {parts!r}"
        )
    return _one_part(trace, parts, part)


def _one_part(trace: Iterable[TraceRequest], parts: int, part: int) -> Iterator[TraceRequest]:
    work = [0] * parts
    place: dict[str | int, int] = {}
    index = ConversationIndex()
    for request in trace:
        name: str | int | None = request.conversation
        if name is None:
            name = index.add(request.blocks, request.input_tokens, request.block_tokens)[0]
        at = place.get(name)
        if at is None:
            at = place[name] = work.index(min(work))
        work[at] += request.input_tokens + request.output_tokens
        if at == part:
            yield request
