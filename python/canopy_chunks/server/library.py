"""The documents of one scheduler: their KV by tier, the encoder's queue and tenants' pins."""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from canopy_chunks.fuse.background_encoder import BackgroundEncoder
from canopy_chunks.fuse.encode import capture
from canopy_chunks.fuse.model import Model
from canopy_chunks.fuse.rows import Stop
from canopy_chunks.fuse.selectors import Offline, make_selector
from canopy_chunks.server import model_view
from canopy_chunks.server.options import Options
from canopy_chunks.server.request import ChunkRequest, ResolvedChunk
from canopy_chunks.store.agreed_reads import AgreedReads
from canopy_chunks.store.chunk import Chunk, Placed
from canopy_chunks.store.chunk_folder import can_hold_files
from canopy_chunks.store.disk import DiskChunk
from canopy_chunks.store.document_pins import DocumentPins
from canopy_chunks.store.host_memory import HostMemory
from canopy_chunks.store.read_ahead import ReadAhead
from canopy_chunks.store.store import ChunkStore
from canopy_chunks.text.documents import document_name
from canopy_chunks.text.variants import Heads

logger = logging.getLogger(__name__)

MIN_STORED_SHARE = 0.2
"""Smallest share of the uncached prompt that stored chunks must cover for fusion."""

MAX_PIECES = 8
"""Maximum pieces of encoding that long prompts can save up; each may delay a later short prompt."""

MAX_DELETED = 1 << 12
"""Deleted documents remembered, so that running requests do not store them again."""


class Library:
    """Finds and stores the chunks of requests, and enqueues missing chunks for encoding.

    earlier: the library of previous weights; its pinned documents stay pinned and its reads
    continue.
    """

    def __init__(self, model: Model, options: Options, earlier: Library | None = None) -> None:
        self.model, self.options = model, options
        if earlier is not None:  # a store per training step would fill the disk
            earlier.store.delete_files()
        self.store: ChunkStore = make_store(model, options, must_have_disk=earlier is None)
        pins: DocumentPins | None = earlier.pins if earlier is not None else None
        self.pins: DocumentPins = DocumentPins(self.store, options.tenant_share, pins)
        score = functools.partial(score_chunk, options.selector)
        self.stop: Stop = Stop() if earlier is None else earlier.stop
        self.encoder = BackgroundEncoder(model, self.store, score, self.pins.stored, self.stop)
        self.reads: ReadAhead = (
            ReadAhead(options.read_ahead_mb << 20) if earlier is None else earlier.reads
        )
        self.agreed = AgreedReads(self.reads, model_view.true_on_all)
        self.encode_credit = 0.0
        self.failures = self.deletions = 0
        self.heads: Heads = Heads() if earlier is None else earlier.heads
        self._deleted: OrderedDict[str, int] = OrderedDict()
        """Names of recently deleted documents, each with the number of deletions so far."""

    @property
    def ranked(self) -> bool:
        """Return whether the model is split over ranks, which must decide alike."""
        return self.model.ranks is not None

    def resolve(self, request: ChunkRequest, touch: bool = False) -> list[ResolvedChunk]:
        """Return the chunks of a request, each with its tier in the store.

        touch: count this as a use for eviction, and open the chunks.
        """
        found = []
        for (start, end), keys in zip(request.bounds, request.keys):
            tier, chunk = None, None
            key = next((k for k in keys if (tier := self.store.where(k)) is not None), keys[0])
            if touch and tier is not None:
                chunk = self.store.get(key, request.time_s)
            found.append(ResolvedChunk(start, end, key, tier, chunk))
        return found

    def open(self, request: ChunkRequest, touch: bool = True) -> list[ResolvedChunk]:
        """Resolve the chunks for use; chunks on disk are taken from the read-ahead if possible.

        Without ``touch`` it does not count as a use for eviction.
        """
        chunks = self.resolve(request, touch)
        for one in chunks:
            if not touch:
                one.chunk = self.store.look(one.key)
            if one.tier == "disk":
                one.chunk = self.agreed.take(one.key) or self.reads.take(one.key) or one.chunk
        return chunks

    def placed_for_check(self, request: ChunkRequest, total: int) -> tuple[Placed, ...]:
        """Return the stored chunks of a prompt of ``total`` tokens; empty if too few are stored."""
        self.agree_on_reads([request])
        chunks = self.open(request, touch=False)
        self.agreed.clear()
        if not reusable_tokens(chunks, 0, total):
            return ()
        return tuple(p for k in chunks if (p := k.placed_from(0)) is not None)

    def forget(self, request: ChunkRequest) -> None:
        """Delete the stored chunks of a request's documents, so that they are encoded again."""
        for keys in request.keys:
            for key in keys:
                self.store.delete(key)

    def read_ahead(self, request: ChunkRequest) -> None:
        """Read a new request's chunks from disk while it waits."""
        if not self.options.disk_mb:
            return
        chunks = self.resolve(request)
        if not reusable_tokens(chunks, 0, request.bounds[-1][1] if request.bounds else 0):
            return
        for one in chunks:
            chunk = self.store.look(one.key) if one.tier == "disk" else None
            if isinstance(chunk, DiskChunk):
                self.reads.request(one.key, chunk, request)

    def agree_on_reads(self, requests: Sequence[ChunkRequest]) -> None:
        """Agree among ranks on the disk chunks of requests to be planned (:class:`AgreedReads`)."""
        if not self.ranked or not self.options.disk_mb:
            return
        self.agreed.read(
            self.store,
            lambda: [one.key for r in requests for one in self.resolve(r) if one.tier == "disk"],
        )

    def delete_damaged(self, request: ChunkRequest) -> None:
        """Delete chunks whose file cannot be read, after failed planning, so that they are encoded
        again.

        Not on several ranks, which have already agreed on the readable chunks.
        """
        if not self.ranked:
            self.store.delete_damaged({key for keys in request.keys for key in keys})

    def encode_missing(
        self, ids: Sequence[int], request: ChunkRequest, cache: Callable[[], Any]
    ) -> None:
        """Store or enqueue the chunks that the store lacks, after a prefill.

        A first chunk that was computed plainly, after exactly the prefix it is to be encoded with,
        is taken from the pool unchanged. cache: returns the request's KV in the pool. Turns and
        retries that extend kept KV have the same head, and are no evidence that the head recurs.
        """
        returns = not request.kept and bool(request.places)
        returns = returns and self.heads.seen_before(request.salt, request.places[0].head)
        for (start, end), keys, place in zip(request.bounds, request.keys, request.places):
            document = ids[start:end]
            if self._is_deleted(document, request):
                continue
            addresses = dict(zip(place.acceptable(), keys))
            for good in place.to_encode(returns):
                if any(self.store.where(addresses[p]) is not None for p in good):
                    continue
                prefix, key = good[0], addresses[good[0]]
                if not request.fused and tuple(ids[:start]) == prefix:
                    chunk = capture(self.model, cache(), document, start, prefix)
                    self.encoder.store_chunk(
                        key, chunk, request.salt, request.tenant, request.time_s
                    )
                else:
                    self.encoder.enqueue(document, prefix, request.salt, request.tenant)

    def _is_deleted(self, document: Sequence[int], request: ChunkRequest) -> bool:
        """Return whether a document was deleted while its request was running."""
        if request.deletions == self.deletions:
            return False
        name = document_name(document, request.tenant)
        return self._deleted.get(name, 0) > request.deletions

    def earn_encoding(self, tokens: int) -> None:
        """Credit a prefill of ``tokens``: a share of them may be encoded later, under load.

        The credit is at most ``MAX_PIECES`` pieces, or this prefill's share if that is larger.
        """
        earned = self.options.learn_share * tokens
        most = max(MAX_PIECES * self.encoder.piece_tokens, earned)
        busy = self.encoder.busy
        self.encode_credit = min(self.encode_credit + earned, most) if busy else 0.0

    def spend_encoding(self, now: float, tokens: int) -> None:
        """Encode earned pieces before a batch of ``tokens``: one, or as many as its share allows.

        Runs before the next forward, never between a prefill and its answer, so that the first
        request with a document does not wait for its encoding. A short prompt does not wait for the
        pieces that a long prompt has earned.
        """
        piece, pieces = self.encoder.piece_tokens, 0
        most = max(1, int(self.options.learn_share * tokens) // piece)
        while self.encode_credit >= piece and pieces < most:
            done = self.encode_piece(now)
            self.encode_credit = self.encode_credit - done if done else 0.0
            pieces += 1

    def encode_piece(self, now: float) -> int:
        """Encode one piece of the queue; returns its tokens. A failing chunk is dropped."""
        try:
            return self.encoder.step(now)
        except Exception:
            logger.exception("canopy: a chunk could not be encoded; it is dropped")
            self.failures += 1
            self.encoder.abandon()
            return 0

    def command(self, verb: str, name: str, tenant: str | None) -> bool:
        """Pin, unpin or delete a tenant's document in every version.

        Returns False if no version is stored or pinned, or if the tenant's pins are full.
        """
        if verb == "pin":
            return self.pins.pin(name, tenant)
        unpinned = self.pins.unpin(name, tenant)
        if verb == "unpin":
            return unpinned
        self.encoder.forget(name, tenant)
        self.deletions += 1
        self._deleted[name] = self.deletions
        self._deleted.move_to_end(name)
        if len(self._deleted) > MAX_DELETED:
            self._deleted.popitem(last=False)
        return sum(self.store.delete(key) for key in self.pins.keys(name, tenant)) > 0

    def stats(self) -> dict[str, Any]:
        """Return the counters since the start; tokens, bytes."""
        return {
            **self.encoder.stats(),
            "pinned_bytes": self.pins.pinned_bytes.total(),
            "pinned_chunks": len(self.pins.chunks),
            "read_ahead": self.reads.stats(),
        }


def reusable_tokens(chunks: Sequence[ResolvedChunk], prefix: int, total: int) -> int:
    """Return the tokens whose KV would be reused, before recomputation; 0 if too few."""
    usable = sum(max(0, k.end - max(k.start, prefix)) for k in chunks if k.tier is not None)
    return usable if usable and usable >= MIN_STORED_SHARE * (total - prefix) else 0


def make_store(model: Model, options: Options, must_have_disk: bool = True) -> ChunkStore:
    """Build the tiers of the server's options. Each rank has its own folder.

    Raises CanopyError if the folder cannot be used; without ``must_have_disk`` the disk tier is
    then omitted instead.
    """
    ranked, sizes, folder = model.ranks is not None, options.capacity_bytes(), options.directory
    if ranked:
        folder = model_view.folder_of_rank(folder)
    if folder is not None and not must_have_disk:
        usable = can_hold_files(folder)
        if not (model_view.true_on_all([usable])[0] if ranked else usable):
            logger.warning("canopy: %s cannot be used; documents are kept in memory only", folder)
            folder, sizes = None, {"device": 0, **sizes, "disk": 0}
    return ChunkStore(
        model.identity,
        sizes,
        folder,
        device=str(model.device),
        keep=model_view.kept_by_all if ranked else None,
        memory=_host_memory(model, options),
    )


def score_chunk(selector: str, chunk: Chunk) -> None:
    """Compute a chunk's scores before it is stored, if the server's selector uses stored scores."""
    chooser = make_selector(selector)
    if isinstance(chooser, Offline):
        chooser.scores(chunk)


def _host_memory(model: Model, options: Options) -> HostMemory | None:
    """Return one allocation for the host tier if the model is on a device; pinned for CUDA."""
    if model.device.type == "cpu" or not options.memory_mb:
        return None
    pin = model.device.type == "cuda"
    return HostMemory(model.shape, model.dtype, options.memory_mb << 20, pin)
