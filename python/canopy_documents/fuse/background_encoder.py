"""Encodes chunks for their next use, in pieces, while the server is idle.

In an ordinary prompt, a chunk's KV depends on the preceding documents and perhaps on private text,
so it must not enter another user's prompt. The chunk is encoded again: after the tokens before the
first chunk (the system prompt), stand-ins, both or neither (``text/variants.py``). That costs one
prefill of the chunk, in pieces (:func:`~.rows.piece_tokens`): in idle time, and under load within a
share of the requests' own tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from canopy_documents.fuse.cache import KVCache, dense_cache
from canopy_documents.fuse.encode import STAND_IN_TEXTS, capture, stand_in_prefix
from canopy_documents.fuse.model import Model
from canopy_documents.fuse.rows import Stop, attempt, piece_tokens
from canopy_documents.store.chunk import Chunk
from canopy_documents.store.device_copy import to_device
from canopy_documents.store.store import ChunkStore
from sglang_canopy.bounded import BoundedByTenant

MAX_SHORT_BATCHES = 8
"""Maximum short batches in a row that do not wait. A piece of work takes longer than a short batch;
under load without a pause or a long prompt, one batch in nine waits."""


@dataclass(slots=True)
class ShortBatchCounter:
    """Counts consecutive short batches. Decides by counts alone, so that all ranks decide alike."""

    passed_in_a_row: int = 0

    def lets_pass(self, tokens: int, credit: float, piece_tokens: int) -> bool:
        """Return whether a batch of ``tokens`` prompt tokens runs before the work.

        credit: tokens of earned work; less than a piece delays no batch.
        """
        if tokens >= piece_tokens or credit < piece_tokens:
            self.passed_in_a_row = 0
        else:
            self.passed_in_a_row = (self.passed_in_a_row + 1) % (MAX_SHORT_BATCHES + 1)
        return self.passed_in_a_row > 0


MAX_WAITING_TOKENS = 1 << 20
"""Bound of the queue. Chunks that leave a full queue wait until another prompt contains them."""
MIN_QUEUED_TOKENS = 256
"""Tokens that a shorter chunk counts as, so that the number of chunks is bounded too."""


class QueuedChunk(NamedTuple):
    """A chunk to encode: tokens, prefix to encode it after, address salt, tenant."""

    ids: tuple[int, ...]
    prefix: tuple[int, ...]
    salt: str
    tenant: str | None


class EncodeQueue:
    """Chunks by key. Every rank of a split model makes the same calls and gets the same results."""

    def __init__(self) -> None:
        self.waiting: BoundedByTenant[str, QueuedChunk] = BoundedByTenant(MAX_WAITING_TOKENS)
        self.dropped_chunks = 0

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def tokens(self) -> int:
        """Tokens of all queued chunks."""
        return sum(len(entry.value.ids) for entry in self.waiting)

    def add(self, key: str, chunk: QueuedChunk) -> None:
        """Append a chunk to its tenant's queue; a queued chunk keeps its position."""
        if self.waiting.get(chunk.tenant, key) is None:
            size = max(MIN_QUEUED_TOKENS, len(chunk.ids))
            self.dropped_chunks += len(self.waiting.put(chunk.tenant, key, chunk, size))


def stand_in_tokens(tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of the stand-in documents (encoding ``mixed``): of a few, and of all.

    Stand-ins are text, so the result is empty without a tokenizer; ``mixed`` then equals
    ``prefix``.
    """
    if tokenizer is None:
        return ()
    tokenize = functools.partial(tokenizer.encode, add_special_tokens=False)
    return stand_in_prefix(tokenize), stand_in_prefix(tokenize, len(STAND_IN_TEXTS))


@dataclass(slots=True)
class _EncodeJob:
    key: str
    chunk: QueuedChunk
    cache: KVCache
    encoded_tokens: int


class _EncodedPrefix(NamedTuple):
    ids: tuple[int, ...]
    cache: KVCache


class BackgroundEncoder:
    """The queue of chunks to encode, and the chunk in progress.

    ``score(chunk)`` is called before a chunk is stored.
    """

    def __init__(
        self,
        model: Model,
        store: ChunkStore,
        score: Callable[[Chunk], None] = lambda chunk: None,
        stop: Stop | None = None,
    ) -> None:
        self.model, self.store, self.score = model, store, score
        self.stop = stop or Stop()
        self.queue, self.piece_tokens = EncodeQueue(), piece_tokens(model.device)
        self.encoded_tokens = self.encoded_chunks = 0
        self._job: _EncodeJob | None = None
        self._encoded_prefix: _EncodedPrefix | None = None

    def enqueue(
        self, ids: Sequence[int], prefix: Sequence[int], salt: str, tenant: str | None = None
    ) -> None:
        """Queue a chunk to be encoded, unless it is queued or stored already."""
        key = self.store.key(ids, prefix, salt)
        in_progress = self._job is not None and self._job.key == key
        if in_progress or self.store.tier_of(key, len(ids)) is not None:
            return
        self.queue.add(key, QueuedChunk(tuple(ids), tuple(prefix), salt, tenant))

    def forget(self, tenant: str | None) -> bool:
        """Remove a tenant's documents from the queue. Returns whether any was there."""
        was_queued = self.queue.waiting.drop_tenant(tenant)
        if self._job is not None and self._job.chunk.tenant == tenant:
            self._job, was_queued = None, True
        return was_queued

    def abandon(self) -> None:
        """Drop the chunk in progress."""
        self._job = None

    def store_chunk(self, chunk: Chunk, salt: str, tenant: str | None) -> None:
        """Store a chunk that was encoded here or by an ordinary prefill."""
        self.score(chunk)
        chunk.tenant = tenant
        self.store.put(chunk, salt)
        self.encoded_chunks += 1

    def stats(self) -> dict[str, int]:
        """Return the numbers of chunks and tokens that are waiting, encoded, and dropped."""
        return {
            "waiting_documents": len(self.queue) + int(self.busy and not self.queue),
            "waiting_tokens": self.queue.tokens,
            "encoded_chunks": self.encoded_chunks,
            "encoded_tokens": self.encoded_tokens,
            "forgotten_chunks": self.queue.dropped_chunks,
        }

    @property
    def busy(self) -> bool:
        """Whether chunks remain to be encoded."""
        return self._job is not None or bool(self.queue)

    def step(self) -> int:
        """Encode one piece and return its tokens, 0 if the queue is empty or ``stop`` ended the
        piece, which is then repeated."""
        job = self._job or self._next_job()
        if job is None:
            return 0
        self._job = job
        all_ids = (*job.chunk.prefix, *job.chunk.ids)
        start = job.encoded_tokens
        piece = all_ids[start : start + self.stop.limit_rows(self.piece_tokens)]
        ids = to_device(torch.tensor(piece, dtype=torch.long), self.model.device)
        positions = torch.arange(start, start + len(piece), device=self.model.device)
        if attempt(self.model, ids, positions, job.cache, self.stop) is None:
            return 0
        job.encoded_tokens += len(piece)
        self.encoded_tokens += len(piece)
        if job.encoded_tokens == len(all_ids):
            self._job = None
            self._finish(job)
        return len(piece)

    def _next_job(self) -> _EncodeJob | None:
        next_chunk = self.queue.waiting.pop_round_robin()
        if next_chunk is None:
            return None
        _, key, queued = next_chunk
        cache = dense_cache(self.model, len(queued.prefix) + len(queued.ids))
        encoded = 0
        prefix = self._encoded_prefix
        if prefix is not None and prefix.ids == queued.prefix:
            encoded = len(queued.prefix)
            for target, computed in zip(cache.k + cache.v, prefix.cache.k + prefix.cache.v):
                target[:encoded] = computed
        return _EncodeJob(key, queued, cache, encoded)

    def _finish(self, job: _EncodeJob) -> None:
        start = len(job.chunk.prefix)
        chunk = capture(self.model, job.cache, job.chunk.ids, start, job.chunk.prefix)
        self.store_chunk(chunk, job.chunk.salt, job.chunk.tenant)
        encoded_prefix = self._encoded_prefix
        if start and (encoded_prefix is None or encoded_prefix.ids != job.chunk.prefix):
            prefix = dense_cache(self.model, start)
            for target, computed in zip(prefix.k + prefix.v, job.cache.k + job.cache.v):
                target.copy_(computed[:start])
            self._encoded_prefix = _EncodedPrefix(job.chunk.prefix, prefix)
