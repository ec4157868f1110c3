"""Convert trace records into requests for a policy.

Experiments may shuffle the labels among the requests, or add client *hints* from the trace's future,
for a share of the clients and with a given accuracy.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, nextafter

from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError
from sglang_canopy.records import Request


@dataclass(frozen=True, slots=True)
class SimulatedHints:
    """Client hints about the future (``Request.over``, ``Request.return_in_s``).

    ``share`` of the clients (conversations, or requests without one) send hints. A hint is true with
    probability ``accuracy``; a wrong hint is the opposite of ``over``, or another client's return
    time.
    """

    share: float = 1.0
    accuracy: float = 1.0
    over: bool = True
    """Send ``over`` at the end of a conversation."""
    returns: bool = True
    """Send the return time of a conversation."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("share", "accuracy"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise CanopyError(f"hint {name} must be between 0 and 1, got {value}")


def to_requests(
    trace: Iterable[TraceRequest],
    *,
    shuffle_seed: int | None = None,
    hints: SimulatedHints | None = None,
    times_s: Sequence[float] | None = None,
) -> Iterator[Request]:
    """Iterate over the trace as requests, in order.

    Equal times (Mooncake rounds to 3 s) become the next representable floats, so that requests never
    tie. The trace is streamed unless shuffled labels or hints need all of it. ``times_s`` (ascending) replace
    the trace's.

    Raises ``CanopyError`` for a decreasing time.
    """
    if shuffle_seed is None and hints is None:
        records: Iterable[TraceRequest] = trace
        labels = futures = None
    else:
        records = trace if isinstance(trace, Sequence) else list(trace)
        labels = None if shuffle_seed is None else _shuffled_labels(records, shuffle_seed)
        futures = None if hints is None else _simulated_hints(records, hints)
    last_time_s, last_record_s = -inf, -inf
    for index, record in enumerate(records):
        if record.time_s < last_record_s:
            raise CanopyError(
                f"trace line {record.line}: time {record.time_s} s is before the line above "
                f"({last_record_s} s); sort the trace by arrival time"
            )
        last_record_s = record.time_s
        time_s = record.time_s if times_s is None else times_s[index]
        last_time_s = time_s if time_s > last_time_s else nextafter(last_time_s, inf)
        category, turn, stop = _label(record) if labels is None else labels[index]
        over, return_in_s = (False, None) if futures is None else futures[index]
        yield Request(
            time=last_time_s,
            category=category,
            path=record.blocks,
            block_tokens=record.block_tokens,
            prompt_tokens=record.input_tokens,
            output_tokens=record.output_tokens,
            turn=turn,
            conversation=record.conversation,
            stop=stop,
            tenant=record.user,
            over=over,
            return_in_s=return_in_s,
        )


def continuations(trace: Sequence[TraceRequest]) -> list[float | None]:
    """Return for each record the seconds until it is continued, or ``None``.

    A record is continued by the next record that contains its last full block (ids are chained), or
    else by the next record of its conversation, because clients may rewrite their history.
    """
    next_use_s: dict[object, float] = {}
    gaps_s: list[float | None] = []
    for record in reversed(trace):
        full_blocks = record.input_tokens // record.block_tokens
        conversation_key = ("conversation", record.conversation)
        next_time_s = None
        if full_blocks and record.blocks:
            next_time_s = next_use_s.get(record.blocks[min(full_blocks, len(record.blocks)) - 1])
        if next_time_s is None and record.conversation is not None:
            next_time_s = next_use_s.get(conversation_key)
        gaps_s.append(None if next_time_s is None else next_time_s - record.time_s)
        for block in record.blocks:
            next_use_s[block] = record.time_s
        next_use_s[conversation_key] = record.time_s
    gaps_s.reverse()
    return gaps_s


_Label = tuple[str, int, str | None]


def _label(record: TraceRequest) -> _Label:
    return record.category, record.turn, record.stop


def _shuffled_labels(trace: Iterable[TraceRequest], seed: int) -> list[_Label]:
    labels = [_label(record) for record in trace]
    random.Random(seed).shuffle(labels)
    return labels


def _simulated_hints(
    trace: Sequence[TraceRequest], hints: SimulatedHints
) -> list[tuple[bool, float | None]]:
    """Return the hints (over, return_in_s) of each record."""
    rng = random.Random(hints.seed)
    true_gaps_s = continuations(trace)
    gaps_s = [gap_s for gap_s in true_gaps_s if gap_s is not None]
    gives_hints: dict[object, bool] = {}
    hint_pairs: list[tuple[bool, float | None]] = []
    for index, (record, gap_s) in enumerate(zip(trace, true_gaps_s)):
        client: object = index if record.conversation is None else record.conversation
        if client not in gives_hints:
            gives_hints[client] = rng.random() < hints.share
        is_true = rng.random() < hints.accuracy
        wrong_gap_s = rng.choice(gaps_s) if gaps_s else None
        if not gives_hints[client]:
            hint_pairs.append((False, None))
            continue
        over = (gap_s is None) == is_true
        hinted_gap_s = (gap_s if is_true else wrong_gap_s) if not over else None
        hint_pairs.append((hints.over and over, hinted_gap_s if hints.returns else None))
    return hint_pairs
