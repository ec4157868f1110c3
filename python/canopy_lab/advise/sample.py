"""Read a log of any length into a sample of bounded size: whole conversations, chosen by hash.

As in SHARDS with a fixed sample size (Waldspurger et al., FAST 2015, Section 3.2), only that the
unit is a conversation: its hash is kept if it lies below a threshold, and the threshold is halved
whenever the sample has grown too large. What is kept does not depend on the order of the log. A
cache is then scaled down with the sample: blocks of one conversation by the threshold, blocks that
several conversations of the sample share not at all, since those are in every sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from canopy_lab.trace import lines
from canopy_lab.trace.infer import ConversationIndex
from canopy_lab.trace.open import TEXT_FORMATS, check_log, open_prompts, open_trace
from canopy_lab.trace.prompts import (
    Cutter,
    LoggedPrompt,
    changed,
    coarser,
    in_order,
    record,
    with_conversation,
)
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError

MOST_REQUESTS = 20_000
MOST_ACCESSES = 2_000_000
"""Block accesses that are kept: blocks are merged, then the sample is thinned out."""
COARSEST_SHARE = 1 / 32
"""Blocks may be merged up to this share of the mean prompt: what is cut off at its end is small."""
COARSEST_TOKENS = (64, 1024)
"""Least and most of that length."""
_FULL = 1 << 32

Progress = Callable[[int], object]


@dataclass(slots=True)
class Sample:
    """What advice is made of."""

    requests: list[TraceRequest] = field(default_factory=list)
    """By time, from 0 on; in blocks of ``block_tokens``."""
    one_in: int = 1
    """Of so many conversations one was kept."""
    requests_in_log: int = 0
    tokens_in_log: int = 0
    """Prompt tokens, as the log was cut."""
    span_s: float = 0.0
    """Of the log."""
    block_tokens: int = 0
    merged: int = 1
    """Blocks of the log in one of the sample's."""
    method: str = ""
    """How texts became tokens; empty where the log has blocks."""
    token_scale: float = 1.0
    """Tokens as the log's server counted them, for each one here."""
    distinct_blocks: int = 0
    """Of the sample."""
    log_blocks: float = 0.0
    """Estimate for the log, in the sample's blocks."""
    has_content: bool = True
    """Whether the format says which prompts share a prefix."""

    @property
    def share(self) -> float:
        """The sample's distinct blocks as a share of the log's: what capacities are scaled by."""
        return self.distinct_blocks / self.log_blocks if self.log_blocks else 1.0

    def blocks_of(self, tokens: float) -> int:
        """A cache of ``tokens`` (the server's) in blocks of the sample, scaled down with it."""
        return max(1, round(tokens / self.token_scale / self.block_tokens * self.share))

    def tokens_of(self, blocks: float) -> float:
        """The other way round."""
        return blocks / self.share * self.block_tokens * self.token_scale


class Thinned:
    """Rows kept by the hash of their conversation: ``most`` at most, and so many block accesses."""

    def __init__(self, most: int, most_accesses: int) -> None:
        self.most, self.most_accesses = most, most_accesses
        self.one_in = self.merged = 1
        self._below = _FULL
        self._rows: dict[int, list[TraceRequest]] = {}
        self._count = self._accesses = self._tokens = 0

    def wants(self, key: int) -> bool:
        """Whether a conversation's hash is below the threshold of now."""
        return key < self._below

    def add(self, key: int, row: TraceRequest) -> None:
        """Keep a row of a wanted conversation."""
        row = merged(row, self.merged)
        self._rows.setdefault(key, []).append(row)
        self._account(row, 1)
        while self._accesses > self.most_accesses and self._may_merge(row):
            self._merge()
            row = self._rows[key][-1]
        # One conversation may be more than was asked for: rather that than none.
        while (self._count > self.most or self._accesses > self.most_accesses) and len(
            self._rows
        ) > 1:
            self._halve()

    def rows(self) -> list[TraceRequest]:
        """What is kept, by time."""
        return sorted((r for rows in self._rows.values() for r in rows), key=lambda r: r.time_s)

    def _account(self, row: TraceRequest, sign: int) -> None:
        self._count += sign
        self._accesses += sign * len(row.blocks)
        self._tokens += sign * row.input_tokens

    def _may_merge(self, row: TraceRequest) -> bool:
        least, most = COARSEST_TOKENS
        coarsest = min(max(self._tokens / self._count * COARSEST_SHARE, least), most)
        return 2 * row.block_tokens <= coarsest

    def _merge(self) -> None:
        self.merged *= 2
        for key, rows in self._rows.items():
            self._rows[key] = [merged(row, 2) for row in rows]
        self._accesses = sum(len(r.blocks) for rows in self._rows.values() for r in rows)

    def _halve(self) -> None:
        """Keep one in twice as many conversations."""
        self._below //= 2
        self.one_in *= 2
        for key in [k for k in self._rows if k >= self._below]:
            for row in self._rows.pop(key):
                self._account(row, -1)


def merged(request: TraceRequest, factor: int) -> TraceRequest:
    """The request in blocks ``factor`` times as long."""
    if factor == 1:
        return request
    blocks = coarser(request.blocks, factor)
    return changed(request, blocks=blocks, block_tokens=request.block_tokens * factor)


def read_sample(
    path: Path | str,
    format: str,
    *,
    tokenizer: str | None = None,
    most_requests: int = MOST_REQUESTS,
    most_accesses: int = MOST_ACCESSES,
    skip_bad: int = 0,
    progress: Progress = lambda n: None,
) -> Sample:
    """Read ``path`` once, in memory bounded by the sample (and what infers conversations).

    Raises ``CanopyError`` for a log without requests, and what readers raise.
    """
    path = check_log(path, format, tokenizer)
    if most_requests < 1:
        raise CanopyError(f"the sample must be of 1 request or more, got {most_requests}")
    made, kept = Sample(has_content=format != "azure"), Thinned(most_requests, most_accesses)
    tolerance = lines.Tolerance(path, skip_bad)
    if format in TEXT_FORMATS:
        cutter = Cutter(tokenizer)
        made.method = cutter.method
        _take(_from_text(open_prompts(path, format, tolerance), cutter, kept, made, progress), kept)
        tolerance.report()
    else:
        trace = open_trace(path, format, skip_bad=skip_bad)
        _take(_from_blocks(trace, made, progress), kept)
    if not made.requests_in_log:
        raise CanopyError(f"{str(path)!r} holds no requests; give a log that has")
    _finish(made, kept)
    return made


def sample_of(trace: Iterable[TraceRequest], most_requests: int = MOST_REQUESTS) -> Sample:
    """The same from requests that were read already. Raises ``CanopyError`` where there are none."""
    made, kept = Sample(), Thinned(most_requests, MOST_ACCESSES)
    ids: dict[int, int] = {}  # a server's own ids take 64 bits without a sign
    numbered = (
        changed(r, blocks=tuple([ids.setdefault(block, len(ids)) for block in r.blocks]))
        for r in trace
    )
    _take(_from_blocks(numbered, made, lambda n: None), kept)
    _finish(made, kept)
    return made


def _take(rows: Iterable[TraceRequest], kept: Thinned) -> None:
    for row in rows:
        key = conversation_key(row)
        if kept.wants(key):
            kept.add(key, row)


def conversation_key(request: TraceRequest) -> int:
    """32 bits of the hash of a request's conversation; sub-agents go with their parent."""
    name = request.conversation
    if name is None:
        name = f"line {request.line}"
    return _key(name.split("/", 1)[0])


def _key(name: str) -> int:
    raw = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4).digest()
    return int.from_bytes(raw, "little")


def _from_blocks(
    trace: Iterable[TraceRequest], made: Sample, progress: Progress
) -> Iterator[TraceRequest]:
    first = None
    for row in trace:
        first = row.time_s if first is None else first
        made.requests_in_log += 1
        made.tokens_in_log += row.input_tokens
        made.span_s = max(made.span_s, row.time_s - first)
        progress(1)
        yield row


def _from_text(
    prompts: Iterable[LoggedPrompt],
    cutter: Cutter,
    kept: Thinned,
    made: Sample,
    progress: Progress,
) -> Iterator[TraceRequest]:
    """Rows of the prompts; those whose conversation is known not to be kept are never cut."""
    first, last = float("inf"), float("-inf")
    counted = [0, 0]

    def rows() -> Iterator[TraceRequest]:
        nonlocal first, last
        for prompt in prompts:
            made.requests_in_log += 1
            first, last = min(first, prompt.time_s), max(last, prompt.time_s)
            progress(1)
            if prompt.conversation is None and prompt.opening is not None:
                # Enough to thin out by. A conversation may be asked again from its beginning.
                digest = blake2b(prompt.opening.encode("utf-8", "surrogatepass"), digest_size=8)
                prompt.conversation = digest.hexdigest()
            is_named = prompt.conversation is not None
            if is_named and not kept.wants(_key(str(prompt.conversation).split("/", 1)[0])):
                made.tokens_in_log += prompt.size()
                continue
            row = record(prompt, cutter)
            made.tokens_in_log += row.input_tokens
            if prompt.logged_tokens is not None and row.input_tokens:
                counted[0] += prompt.logged_tokens
                counted[1] += row.input_tokens
            yield row

    index = ConversationIndex()
    for row in in_order(rows()):
        yield with_conversation(row, index)
    made.span_s = max(last - first, 0.0)
    if counted[1]:
        made.token_scale = counted[0] / counted[1]


def _finish(made: Sample, kept: Thinned) -> None:
    """Begin at 0, and count what is shared."""
    rows = kept.rows()
    if not rows:
        raise CanopyError("no conversation of the log was kept; raise --sample-requests")
    start = rows[0].time_s
    one: dict[int, int] = {}
    for at, r in enumerate(rows):
        # Equal ids as one object each: most are asked for again and again.
        blocks = tuple([one.setdefault(block, block) for block in r.blocks])
        rows[at] = changed(r, time_s=r.time_s - start, blocks=blocks)
    made.requests, made.merged, made.one_in = rows, kept.merged, kept.one_in
    made.block_tokens = rows[0].block_tokens
    owner: dict[int, str | int | None] = {}
    shared: set[int] = set()
    for number, r in enumerate(made.requests):
        who = number if r.conversation is None else r.conversation
        for block in r.blocks:
            if owner.setdefault(block, who) != who:
                shared.add(block)
    made.distinct_blocks = len(owner)
    made.log_blocks = (len(owner) - len(shared)) * float(made.one_in) + len(shared)
