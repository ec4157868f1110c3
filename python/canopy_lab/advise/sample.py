"""Read a log of any length into a sample of bounded size: whole conversations, chosen by hash.

The method is SHARDS with a fixed sample size (Waldspurger et al., FAST 2015, Section 3.2), with
conversations as the unit. A conversation is sampled if its hash is below a threshold, and the
threshold is halved when the sample grows too large, so the order of the log does not matter. The
cache is scaled down with the sample: blocks of one conversation by the threshold. Blocks that
several sampled conversations share are in every sample, so they are not scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

from canopy_lab.advise.token_scale import TokenScale
from canopy_lab.trace import lines
from canopy_lab.trace.infer import ConversationIndex
from canopy_lab.trace.open import TEXT_FORMATS, check_log, open_prompts, read_trace
from canopy_lab.trace.prompts import (
    Cutter,
    LoggedPrompt,
    copy_with,
    merge_blocks,
    shift_to_zero,
    to_record,
    with_conversation,
)
from canopy_lab.trace.record import TraceRequest
from canopy_lab.trace.understood import Understood
from sglang_canopy.errors import CanopyError

MAX_REQUESTS = 20_000
MAX_ACCESSES = 2_000_000
"""Maximum block accesses of a sample. Beyond it, blocks are merged, then conversations dropped."""
MAX_BLOCK_SHARE_OF_PROMPT = 1 / 32
"""Longest merged block as a share of the mean prompt. It bounds the partial block at a prompt's end."""
MERGED_BLOCK_BOUNDS_TOKENS = (64, 1024)
"""Bounds of that length, in tokens."""
_HASH_RANGE = 1 << 32

Progress = Callable[[int], object]


@dataclass(slots=True)
class LogSample:
    """A sample of a log: the input of advice."""

    requests: list[TraceRequest] = field(default_factory=list)
    """Sorted by time, from 0 on; in blocks of ``block_tokens``."""
    one_in: int = 1
    """The sample has one in this number of conversations."""
    requests_in_log: int = 0
    tokens_in_log: int = 0
    """Prompt tokens of the log, as the reader cut it."""
    span_s: float = 0.0
    """Duration of the log."""
    block_tokens: int = 0
    merged: int = 1
    """Blocks of the log in one block of the sample."""
    method: str = ""
    """Method that cut texts into tokens; empty for a log of blocks."""
    token_scale: float = 1.0
    """Tokens of the server for one token of the sample."""
    distinct_blocks: int = 0
    log_blocks: float = 0.0
    """Estimate for the log, in the sample's blocks."""
    conversations: int = 0
    """Conversations in the log, estimated if it is sampled."""
    understood: Understood = field(default_factory=Understood)
    """Counts of the reader: lines read, ignored and changed."""

    def to_json(self) -> dict[str, Any]:
        """Return all fields; the requests as their number."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return values | {"requests": len(self.requests), "understood": self.understood.as_dict()}

    @property
    def sampled_share(self) -> float:
        """Return the sample's distinct blocks as a share of the log's: the scale of capacities."""
        return self.distinct_blocks / self.log_blocks if self.log_blocks else 1.0

    def blocks_of(self, tokens: float) -> int:
        """Convert a capacity in tokens of the server to blocks of the sample."""
        return max(1, round(tokens / self.token_scale / self.block_tokens * self.sampled_share))

    def tokens_of(self, blocks: float) -> float:
        """Convert blocks of the sample to tokens of the server."""
        return blocks / self.sampled_share * self.block_tokens * self.token_scale


class RequestSampler:
    """Requests of sampled conversations: at most ``max_requests`` requests with ``max_accesses`` blocks."""

    def __init__(self, max_requests: int, max_accesses: int) -> None:
        self.max_requests, self.max_accesses = max_requests, max_accesses
        self.one_in = self.merged = 1
        self._threshold = _HASH_RANGE
        self._sampled: dict[int, list[tuple[int, TraceRequest]]] = {}
        """Hash of a conversation -> its requests, each with its ordinal."""
        self._ordinals = count()
        self._request_count = self._access_count = self._token_count = 0

    def selects(self, conversation_hash: int) -> bool:
        """Return whether a conversation's hash is below the current threshold."""
        return conversation_hash < self._threshold

    @property
    def conversation_count(self) -> int:
        """Estimated conversations of the log."""
        return len(self._sampled) * self.one_in

    def add(self, conversation_hash: int, request: TraceRequest) -> None:
        """Add a request of a sampled conversation."""
        request = with_long_blocks(request, self.merged)
        self._sampled.setdefault(conversation_hash, []).append((next(self._ordinals), request))
        self._count_request(request, 1)
        while self._access_count > self.max_accesses and self._may_merge_blocks(request):
            self._merge_blocks()
            request = self._sampled[conversation_hash][-1][1]
        # A single conversation may exceed the limits: a sample is never empty.
        while (
            self._request_count > self.max_requests or self._access_count > self.max_accesses
        ) and len(self._sampled) > 1:
            self._halve_threshold()

    def requests(self) -> list[TraceRequest]:
        """Return the sampled requests, sorted by time and, for equal times, by the order of ``add``."""
        ordered = sorted((r.time_s, n, r) for pairs in self._sampled.values() for n, r in pairs)
        return [request for _, _, request in ordered]

    def _count_request(self, request: TraceRequest, sign: int) -> None:
        self._request_count += sign
        self._access_count += sign * len(request.blocks)
        self._token_count += sign * request.input_tokens

    def _may_merge_blocks(self, request: TraceRequest) -> bool:
        lower, upper = MERGED_BLOCK_BOUNDS_TOKENS
        mean_tokens = self._token_count / self._request_count
        max_tokens = min(max(mean_tokens * MAX_BLOCK_SHARE_OF_PROMPT, lower), upper)
        return 2 * request.block_tokens <= max_tokens

    def _merge_blocks(self) -> None:
        self.merged *= 2
        for conversation_hash, pairs in self._sampled.items():
            self._sampled[conversation_hash] = [(n, with_long_blocks(r, 2)) for n, r in pairs]
        self._access_count = sum(len(request.blocks) for request in self.requests())

    def _halve_threshold(self) -> None:
        self._threshold //= 2
        self.one_in *= 2
        for conversation_hash in [h for h in self._sampled if h >= self._threshold]:
            for _, request in self._sampled.pop(conversation_hash):
                self._count_request(request, -1)


def with_long_blocks(request: TraceRequest, factor: int) -> TraceRequest:
    """Return the request with blocks ``factor`` times as long."""
    if factor == 1:
        return request
    blocks = merge_blocks(request.blocks, factor)
    return copy_with(request, blocks=blocks, block_tokens=request.block_tokens * factor)


def read_sample(
    path: Path | str,
    format: str,
    *,
    tokenizer: str | None = None,
    max_requests: int = MAX_REQUESTS,
    max_accesses: int = MAX_ACCESSES,
    skip_bad: int = 0,
    progress: Progress = lambda n: None,
) -> LogSample:
    """Read ``path`` once, in bounded memory. Raises ``CanopyError`` for a log without requests."""
    path = check_log(path, format, tokenizer)
    sample, sampler = LogSample(), RequestSampler(max_requests, max_accesses)
    tolerance = lines.Tolerance(path, skip_bad)
    sample.understood = tolerance.understood
    if format in TEXT_FORMATS:
        cutter, scale = Cutter(tokenizer), TokenScale(tokenizer is not None)
        sample.method = cutter.method
        prompts = open_prompts(path, format, tolerance)
        _collect(_cut_texts(prompts, cutter, sampler, sample, scale, tolerance, progress), sampler)
        sample.token_scale = scale.value(tolerance.understood)
        tolerance.report()
    else:
        _collect(_count_requests(read_trace(path, format, tolerance), sample, progress), sampler)
    if not sample.requests_in_log:
        raise CanopyError(_no_requests_text(path, tolerance.understood))
    _finish(sample, sampler)
    return sample


def _no_requests_text(path: Path, understood: Understood) -> str:
    left_out = ", ".join(f"{n:,} {why}" for why, n in understood.left_out.most_common())
    return f"{str(path)!r} holds no requests{f' ({left_out})' if left_out else ''}; give a log that has"


def sample_of(trace: Iterable[TraceRequest], max_requests: int = MAX_REQUESTS) -> LogSample:
    """Return a sample of ``trace``. Raises ``CanopyError`` for an empty trace."""
    sample, sampler = LogSample(), RequestSampler(max_requests, MAX_ACCESSES)
    ids: dict[int, int] = {}  # a server's own ids are unsigned 64-bit numbers
    numbered = (
        copy_with(r, blocks=tuple([ids.setdefault(block, len(ids)) for block in r.blocks]))
        for r in trace
    )
    _collect(_count_requests(numbered, sample, lambda n: None), sampler)
    _finish(sample, sampler)
    return sample


def _collect(requests: Iterable[TraceRequest], sampler: RequestSampler) -> None:
    for request in requests:
        conversation_hash = hash_conversation(request)
        if sampler.selects(conversation_hash):
            sampler.add(conversation_hash, request)


def hash_conversation(request: TraceRequest) -> int:
    """Return 32 bits of the hash of a request's conversation. Sub-agents belong to their parent's conversation."""
    name = f"line {request.line}" if request.conversation is None else request.conversation
    return _hash_name(name)


def _hash_name(name: str) -> int:
    parent_name = name.split("/", 1)[0]
    raw = blake2b(parent_name.encode("utf-8", "surrogatepass"), digest_size=4).digest()
    return int.from_bytes(raw, "little")


def _count_requests(
    trace: Iterable[TraceRequest], sample: LogSample, progress: Progress
) -> Iterator[TraceRequest]:
    start_s = None
    for request in trace:
        start_s = request.time_s if start_s is None else start_s
        sample.requests_in_log += 1
        sample.tokens_in_log += request.input_tokens
        sample.span_s = max(sample.span_s, request.time_s - start_s)
        progress(1)
        yield request


def _cut_texts(
    prompts: Iterable[LoggedPrompt],
    cutter: Cutter,
    sampler: RequestSampler,
    sample: LogSample,
    scale: TokenScale,
    tolerance: lines.Tolerance,
    progress: Progress,
) -> Iterator[TraceRequest]:
    """Yield the prompts' requests. Prompts of named conversations outside the sample are not cut."""
    start_s, end_s = float("inf"), float("-inf")

    def convert() -> Iterator[TraceRequest]:
        nonlocal start_s, end_s
        for prompt in prompts:
            sample.requests_in_log += 1
            tolerance.understood.requests += 1
            start_s, end_s = min(start_s, prompt.time_s), max(end_s, prompt.time_s)
            progress(1)
            is_named = prompt.conversation is not None
            if is_named and not sampler.selects(_hash_name(str(prompt.conversation))):
                sample.tokens_in_log += prompt.count_tokens()
                continue
            request = to_record(prompt, cutter)
            sample.tokens_in_log += request.input_tokens
            scale.add(prompt, request.input_tokens)
            yield request

    conversations = ConversationIndex()
    for request in shift_to_zero(convert(), tolerance):
        yield with_conversation(request, conversations)
    sample.span_s = max(end_s - start_s, 0.0)


def _finish(sample: LogSample, sampler: RequestSampler) -> None:
    """Shift times to start at 0, and count distinct and shared blocks."""
    requests = sampler.requests()
    if not requests:
        raise CanopyError("no conversation of the log was kept; raise --sample-requests")
    start_s = requests[0].time_s
    interned: dict[int, int] = {}
    for index, request in enumerate(requests):
        # Intern the ids: most repeat, and equal ints would be separate objects.
        blocks = tuple([interned.setdefault(block, block) for block in request.blocks])
        requests[index] = copy_with(request, time_s=request.time_s - start_s, blocks=blocks)
    sample.requests, sample.merged, sample.one_in = requests, sampler.merged, sampler.one_in
    sample.conversations = sampler.conversation_count
    sample.block_tokens = requests[0].block_tokens
    owners: dict[int, str | int | None] = {}
    shared: set[int] = set()
    for number, request in enumerate(sample.requests):
        owner_name = number if request.conversation is None else request.conversation
        for block in request.blocks:
            if owners.setdefault(block, owner_name) != owner_name:
                shared.add(block)
    sample.distinct_blocks = len(owners)
    sample.log_blocks = (len(owners) - len(shared)) * float(sample.one_in) + len(shared)
