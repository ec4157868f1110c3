"""The documents of one scheduler: their stored KV, and the queue of documents to encode."""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from canopy_documents.fuse.background_encoder import BackgroundEncoder
from canopy_documents.fuse.encode import capture
from canopy_documents.fuse.model import Model
from canopy_documents.fuse.rows import Stop
from canopy_documents.fuse.selectors import OfflineSelector, make_selector
from canopy_documents.server.options import ReuseOptions
from canopy_documents.server.request import (
    IN_PREFIX,
    TOO_FEW_STORED,
    DocumentRequest,
    ResolvedDocument,
)
from canopy_documents.store.chunk import Chunk, PlacedChunk
from canopy_documents.store.disk import ChunkDisk
from canopy_documents.store.host_memory import HostMemory
from canopy_documents.store.store import ChunkStore
from canopy_documents.text.variants import Heads
from sglang_canopy.errors import CanopyError

logger = logging.getLogger(__name__)

MIN_STORED_SHARE = 0.2
"""Smallest share of the uncached prompt that stored documents must cover for fusion."""

MAX_SAVED_PIECES = 8
"""Maximum pieces of encoding that long prompts can save up; each may delay a later short prompt."""

MAX_DELETED_TENANTS = 1 << 12
"""Tenants remembered whose documents were deleted, so that running requests store none again."""


class Library:
    """Finds and stores the documents of requests, and enqueues missing documents for encoding.

    old: the library of previous weights, whose files are deleted.
    """

    def __init__(self, model: Model, options: ReuseOptions, old: Library | None = None) -> None:
        self.model, self.options = model, options
        if old is not None:  # a store per training step would fill the disk
            old.store.discard()
        self.store: ChunkStore = make_store(model, options, must_have_disk=old is None)
        score = functools.partial(score_chunk, options.selector)
        self.stop: Stop = Stop() if old is None else old.stop
        self.encoder = BackgroundEncoder(model, self.store, score, self.stop)
        self.encode_credit = 0.0
        self.failures = self.deletions = 0
        self.heads: Heads = Heads() if old is None else old.heads
        self._deleted: OrderedDict[str | None, int] = OrderedDict()
        """Tenants whose documents were deleted, each with the number of deletions so far."""

    def resolve(self, request: DocumentRequest) -> list[ResolvedDocument]:
        """Return the documents of a request, each with its tier in the store.

        Each stage of a request resolves again, since other requests may have changed the store.
        """
        documents = []
        for (start, end), keys in zip(request.bounds, request.keys):
            tier: str | None = None
            place = next(
                (i for i, k in enumerate(keys) if (tier := self.store.tier_of(k, end - start))), 0
            )
            documents.append(ResolvedDocument(start, end, keys[place], place, tier))
        return documents

    def load(self, request: DocumentRequest, ids: Sequence[int]) -> list[ResolvedDocument]:
        """Resolve the documents of a prompt for use; a document that cannot be read has no tier."""
        documents = self.resolve(request)
        for resolved, variants in zip(documents, request.variants):
            if resolved.tier is not None:
                prefix = variants.acceptable_prefixes()[resolved.prefix_index]
                resolved.chunk = self.store.get(
                    resolved.key, ids[resolved.start : resolved.end], prefix, request.tenant
                )
                resolved.tier = resolved.tier if resolved.chunk is not None else None
        return documents

    def find_placed(self, request: DocumentRequest, ids: Sequence[int]) -> tuple[PlacedChunk, ...]:
        """Return the stored documents of a prompt; empty if too few are stored."""
        if not reusable_tokens(self.resolve(request), 0, len(ids)):
            return ()
        placed = (d.placed_from(0) for d in self.load(request, ids))
        return tuple(p for p in placed if p is not None)

    def forget(self, request: DocumentRequest) -> None:
        """Delete a request's stored documents, so that they are encoded again."""
        for keys in request.keys:
            for key in keys:
                self.store.delete(key)

    def read_ahead(self, request: DocumentRequest) -> None:
        """Read a new request's documents from disk while it waits."""
        disk = self.store.disk
        if disk is None:
            return
        documents = self.resolve(request)
        if reusable_tokens(documents, 0, request.bounds[-1][1] if request.bounds else 0):
            for document in documents:
                if document.tier == "disk":
                    disk.read_ahead(document.key, document.end - document.start)

    def encode_missing(
        self, ids: Sequence[int], request: DocumentRequest, cache: Callable[[], Any]
    ) -> None:
        """Store or enqueue the documents that the store lacks, after a prefill.

        A first document that was computed plainly, after exactly the prefix it is to be encoded with,
        is taken from the pool unchanged. cache: returns the request's KV in the pool. Turns and
        retries that extend kept KV have the same head, and are no evidence that the head recurs.
        """
        if self._deleted.get(request.tenant, 0) > request.deletions:
            return
        head_recurs = not request.kept_tokens and bool(request.variants)
        head_recurs = head_recurs and self.heads.record_head(request.salt, request.variants[0].head)
        for (start, end), keys, variants in zip(request.bounds, request.keys, request.variants):
            document = ids[start:end]
            addresses = dict(zip(variants.acceptable_prefixes(), keys))
            for group in variants.prefixes_to_encode(head_recurs):
                if any(self.store.tier_of(addresses[p], end - start) is not None for p in group):
                    continue
                prefix = group[0]
                if not request.is_fused and tuple(ids[:start]) == prefix:
                    chunk = capture(self.model, cache(), document, start, prefix)
                    self.encoder.store_chunk(chunk, request.salt, request.tenant)
                else:
                    self.encoder.enqueue(document, prefix, request.salt, request.tenant)

    def earn_encoding(self, tokens: int) -> None:
        """Credit a prefill of ``tokens``: a share of them may be encoded later, under load.

        The credit is at most ``MAX_SAVED_PIECES`` or this prefill's share, if that is larger.
        """
        earned_tokens = self.options.learn_share * tokens
        limit = max(MAX_SAVED_PIECES * self.encoder.piece_tokens, earned_tokens)
        busy = self.encoder.busy
        self.encode_credit = min(self.encode_credit + earned_tokens, limit) if busy else 0.0

    def spend_encoding(self, tokens: int) -> None:
        """Encode earned pieces before a batch of ``tokens``: one, or as many as its share allows.

        Runs before the next forward, never between a prefill and its answer, so that the first
        request with a document does not wait for its encoding. A short prompt does not wait for the
        pieces that a long prompt has earned.
        """
        piece, pieces = self.encoder.piece_tokens, 0
        limit = max(1, int(self.options.learn_share * tokens) // piece)
        while self.encode_credit >= piece and pieces < limit:
            encoded_tokens = self.encode_piece()
            self.encode_credit = self.encode_credit - encoded_tokens if encoded_tokens else 0.0
            pieces += 1

    def encode_piece(self) -> int:
        """Encode one piece of the queue; returns its tokens. A failing document is dropped."""
        try:
            return self.encoder.step()
        except Exception:
            logger.exception("canopy: a document could not be encoded; it is dropped")
            self.failures += 1
            self.encoder.abandon()
            return 0

    def delete(self, tenant: str | None) -> bool:
        """Delete all documents of a tenant. Returns whether any was stored or waited."""
        was_queued = self.encoder.forget(tenant)
        self.deletions += 1
        self._deleted[tenant] = self.deletions
        self._deleted.move_to_end(tenant)
        if len(self._deleted) > MAX_DELETED_TENANTS:
            self._deleted.popitem(last=False)
        return self.store.delete_tenant(tenant) or was_queued


def reusable_tokens(documents: Sequence[ResolvedDocument], prefix_tokens: int, total: int) -> int:
    """Return the tokens whose KV would be reused, before recomputation; 0 if too few."""
    usable = stored_tokens(documents, prefix_tokens)
    return usable if usable and usable >= MIN_STORED_SHARE * (total - prefix_tokens) else 0


def stored_tokens(documents: Sequence[ResolvedDocument], prefix_tokens: int) -> int:
    """Return the tokens of stored documents after a prefix."""
    return sum(max(0, d.end - max(d.start, prefix_tokens)) for d in documents if d.tier is not None)


def reason_not_reused(documents: Sequence[ResolvedDocument], prefix_tokens: int) -> str:
    """Return why a prompt's documents are not reused after a prefix of the cache."""
    document_tokens = sum(max(0, d.end - max(d.start, prefix_tokens)) for d in documents)
    is_matched = stored_tokens(documents, prefix_tokens) >= document_tokens
    return IN_PREFIX if is_matched else TOO_FEW_STORED


def make_store(model: Model, options: ReuseOptions, must_have_disk: bool = True) -> ChunkStore:
    """Build the store of the server's options.

    Raises CanopyError if its folder cannot be used; without ``must_have_disk`` the disk is then left
    out.
    """
    disk = None
    if options.disk_mb and options.directory is not None:
        size = options.disk_mb << 20
        try:
            disk = ChunkDisk(options.directory, size, model.shape, model.dtype, model.identity)
        except CanopyError as error:
            if must_have_disk:
                raise
            logger.warning("canopy: documents are kept in memory only: %s", error)
    return ChunkStore(model.identity, options.memory_mb << 20, _host_memory(model, options), disk)


def score_chunk(selector: str, chunk: Chunk) -> None:
    """Compute a document's scores before it is stored, if the server's selector uses stored scores."""
    chooser = make_selector(selector)
    if isinstance(chooser, OfflineSelector):
        chooser.scores(chunk)


def _host_memory(model: Model, options: ReuseOptions) -> HostMemory | None:
    """Return one allocation for the host tier if the model is on a device; pinned for CUDA."""
    if model.device.type == "cpu" or not options.memory_mb:
        return None
    pin = model.device.type == "cuda"
    return HostMemory(model.shape, model.dtype, options.memory_mb << 20, pin)
