"""Chunk reuse of one scheduler process: what may be reused, the plan of a request, the counters."""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from canopy_chunks.agreed_reads import AgreedReads
from canopy_chunks.background_encoder import BackgroundEncoder, stand_in_tokens
from canopy_chunks.cache import KVCache
from canopy_chunks.choice import ChosenTokens
from canopy_chunks.chunk import Placed
from canopy_chunks.disk import DiskChunk
from canopy_chunks.encode import capture
from canopy_chunks.fields import BOUNDS, parse_fields
from canopy_chunks.model import Model
from canopy_chunks.placement import place_chunks
from canopy_chunks.ratio import Setting
from canopy_chunks.read_ahead import ReadAhead
from canopy_chunks.server import model_view
from canopy_chunks.server.attention import fuses
from canopy_chunks.server.options import Options
from canopy_chunks.server.plan import (
    choose,
    correction_of,
    make_store,
    normal_report,
    reuse_report,
    reused_by_tier,
    score_chunk,
)
from canopy_chunks.server.request import (
    STILL_ENCODED,
    TOO_FEW_KNOWN,
    ChunkRequest,
    ResolvedChunk,
    ReusePlan,
    chunk_request,
    custom_params,
    ineligible_reason,
)
from canopy_chunks.transfer import base_of, send
from canopy_chunks.versions import DocumentVersions
from sglang_canopy.errors import CanopyError
from sglang_canopy.request.stamp import read_stamp
from sglang_canopy.tenant import namespace_of, tenant_of_req

logger = logging.getLogger(__name__)

COUNTERS = (
    "fused_requests", "reused_tokens", "recomputed_tokens", "fused_batches", "mixed_batches",
    "corrected_requests", "replanned_requests", "split_batches", "most_rows", "fallbacks",
)  # fmt: skip
"""split_batches: batches of more than a window, computed in several forwards; most_rows: the most
tokens that one forward with chunk requests computed; mixed_batches: fused batches with decode rows
in them; corrected_requests: whose reused KV was corrected; replanned_requests: started again after a
retraction; fallbacks: failures that were caught, after which a request or batch ran normally."""

MIN_KNOWN_SHARE = 0.2
"""A prompt is fused if at least this share of what is not cached exactly is in known chunks."""


class ChunkEngine:
    """Plans requests, places reused KV, has missing chunks encoded. One a scheduler, on ``model_runner.canopy_chunks``.

    Raises CanopyError for a model or an attention backend that cannot fuse.
    """

    def __init__(self, runner: Any, options: Options, tokenizer: Any = None) -> None:
        if not fuses(runner.attn_backend):
            raise CanopyError(
                f"the attention backend {type(runner.attn_backend).__name__} cannot fuse; "
                "use --attention-backend torch_native (CPU) or triton"
            )
        self.runner, self.options = runner, options
        self.stand_in = stand_in_tokens(tokenizer) if options.stands_in else ()
        self._begin(model_view.served_model(runner), None)
        self.reads = ReadAhead(options.read_ahead_mb << 20)
        self.agreed = AgreedReads(self.reads, model_view.true_on_all)
        self.counts: Counter[str] = Counter()
        self.not_fused: Counter[str] = Counter()
        self.encode_credit = 0.0
        self.time_s = 0.0
        self.window_tokens: int | None = None
        self.prefill_tokens: int | None = None
        self.ratios: dict[str, float] = {}
        self.setting: Setting | None = None

    @property
    def ranked(self) -> bool:
        """Whether the model is split over ranks, which must decide alike."""
        return self.model.ranks is not None

    def max_rows(self, longest: int) -> int:
        """Tokens that one forward may compute, as SGLang's own admission has it.

        longest: tokens of the batch's longest request, which runs whole without chunked prefill.
        """
        if self.window_tokens is not None:
            return self.window_tokens
        return max(longest, self.prefill_tokens or (1 << 62))

    def weights_changed(self) -> bool:
        """After a flush: other weights make other KV, so their chunks are another store's."""
        model = model_view.served_model(self.runner)
        if model.identity == self.model.identity:
            return False
        self._begin(model, self.versions)
        return True

    def _begin(self, model: Model, earlier: DocumentVersions | None) -> None:
        """With these weights; ``earlier``: the documents of a store of others."""
        options, self.model = self.options, model
        self.store = make_store(model, options)
        self.versions = DocumentVersions(self.store, options.tenant_share, earlier)
        score = functools.partial(score_chunk, options.chosen_selector)
        self.encoder = BackgroundEncoder(model, self.store, score, self.versions.stored)

    def new_request(self, req: Any) -> ChunkRequest | None:
        """The chunk state of a new request; ``None`` where it names no chunks."""
        params = custom_params(req)
        if BOUNDS not in params:
            return None
        try:
            requested = parse_fields(params)
        except CanopyError:  # the entry refuses it: this came by another way
            self.not_fused["malformed"] += 1
            return None
        if requested.off:
            self.not_fused["off"] += 1
            return None
        self.time_s = max(self.time_s, read_stamp(params).get("time", 0.0))
        ids = list(req.origin_input_ids)
        salt = namespace_of(req.extra_key, req.cache_salt).hex()
        tenant = tenant_of_req(req)
        about = (self.store, self.options, self.stand_in, self.time_s)
        return chunk_request(ids, requested, salt, tenant, *about)

    def may_fuse(self, req: Any, request: ChunkRequest) -> bool:
        """Whether a request may be fused at all; the reason is looked for once, and counted.

        Not when the request is made: SGLang fills in some of its fields afterwards.
        """
        if not request.checked:
            request.checked = True
            request.reason = ineligible_reason(req, request, self.options)
            if request.reason:
                self.not_fused[request.reason] += 1
        return request.reason is None

    def resolve(self, request: ChunkRequest, touch: bool = False) -> list[ResolvedChunk]:
        """The chunks of a request, each where the store has it.

        touch: a use, which opens the chunks and counts for eviction.
        """
        found = []
        for (start, end), keys in zip(request.bounds, request.keys):
            tier, chunk = None, None
            key = next((k for k in keys if (tier := self.store.where(k)) is not None), keys[0])
            if touch and tier is not None:
                chunk = self.store.get(key, request.time_s)
            found.append(ResolvedChunk(start, end, key, tier, chunk))
        return found

    def read_ahead(self, request: ChunkRequest) -> None:
        """A request was made: its chunks on disk are read while it waits."""
        if not self.options.disk_mb or not self.options.fuses:
            return
        chunks = self.resolve(request)
        if not self.reusable_tokens(chunks, 0, request.bounds[-1][1] if request.bounds else 0):
            return
        for one in chunks:
            chunk = self.store.look(one.key) if one.tier == "disk" else None
            if isinstance(chunk, DiskChunk):
                self.reads.request(one.key, chunk, request)

    def agree_on_reads(self, requests: Sequence[ChunkRequest]) -> None:
        """Ranks agree on the chunks on disk of requests about to be planned (:class:`AgreedReads`)."""
        if not self.ranked or not self.options.disk_mb:
            return
        self.agreed.read(
            self.store,
            lambda: [one.key for r in requests for one in self.resolve(r) if one.tier == "disk"],
        )

    def reusable_tokens(self, chunks: Sequence[ResolvedChunk], prefix: int, total: int) -> int:
        """Tokens whose KV would be reused, before any is recomputed; 0 where it is not worth it."""
        usable = sum(max(0, k.end - max(k.start, prefix)) for k in chunks if k.tier is not None)
        return usable if usable and usable >= MIN_KNOWN_SHARE * (total - prefix) else 0

    def ratio_for(self, request: ChunkRequest, chunks: Sequence[ResolvedChunk]) -> float:
        """The request's ratio, or the calibrated one of the slowest tier among its chunks."""
        if request.ratio_is_requested or self.options.ratio_is_fixed:
            return request.ratio
        tiers = {k.tier for k in chunks if k.tier is not None}
        rates = [self.ratios[t] for t in tiers if t in self.ratios]
        return max(rates, default=request.ratio)

    def plan(
        self, req: Any, request: ChunkRequest, prefix: int, row: torch.Tensor
    ) -> ReusePlan | None:
        """The plan of a request's prompt, made at its first window; ``None``: run normally.

        row: the slots allocated so far; prefix: tokens of exact KV in it.
        """
        started = time.perf_counter()
        ids = list(req.full_untruncated_fill_ids)
        chunks = self.resolve(request)
        if not self.reusable_tokens(chunks, prefix, len(ids)):
            request.reason = TOO_FEW_KNOWN
            self.not_fused[TOO_FEW_KNOWN] += 1
            request.report = normal_report(request, prefix, chunks)
            return None
        chunks = self.resolve(request, touch=True)
        for one in chunks:
            if one.tier == "disk":
                read = self.agreed.take(one.key) or self.reads.take(one.key)
                if read is not None:
                    one.chunk = read
        placed = tuple(p for k in chunks if (p := k.placed_from(prefix)) is not None)
        ratio = self.ratio_for(request, chunks)
        plan = ReusePlan(ChosenTokens(torch.zeros(len(ids), dtype=torch.bool)), placed, prefix)
        self.counts["replanned_requests"] += request.initial is not None
        plan.chosen, left = choose(self.model, self.runner, request, ids, row, plan, ratio)
        correct = self.options.correct == "on" and 0 < ratio < 1 and row.numel() >= len(ids)
        if left:
            self.write_reused(plan, row, prefix, min(len(ids), row.numel()), left, correct)
        if correct:
            plan.correction = correction_of(self.model, self.runner, ids, row, plan)
        if not request.reported:
            request.report = reuse_report(
                request, chunks, plan, ratio, time.perf_counter() - started
            )
            report = request.report
            request.complete_report = lambda: report.update(reused_by_tier(chunks, plan))
            self.counts["fused_requests"] += 1
            self.counts["reused_tokens"] += request.report["reused"]
            self.counts["recomputed_tokens"] += request.report["recomputed"]
        return plan

    def write_reused(
        self,
        plan: ReusePlan,
        row: torch.Tensor,
        first: int,
        end: int,
        placed: Sequence[Placed] | None = None,
        every: bool = False,
    ) -> None:
        """Write the KV of positions ``first..end`` of all chunks, or of ``placed``, that is reused
        (``every``: or could be) into the row's slots."""
        these = plan.placed if placed is None else placed
        keys, values = model_view.pool_views(self.runner)
        cache = KVCache(keys, values, row, arrivals=plan.arrivals)
        whole = (first, end) == (plan.prefix, plan.chosen.total)
        if whole and not every and not plan.chosen.is_known:
            sent = send(self.model, these, cache, plan.chosen.others(plan.prefix))
            plan.arrivals += [sent] if sent is not None else []
            these = [p for p in these if base_of(p.chunk)[0] is None]
        if not these:
            return
        wanted = torch.ones(plan.chosen.total, dtype=torch.bool) if every else ~plan.computed
        wanted[:first] = False
        wanted[end:] = False
        place_chunks(self.model, these, cache, wanted)

    def delete_damaged(self, request: ChunkRequest) -> None:
        """After planning failed: a chunk whose file cannot be read is deleted, to be encoded again.
        Ranks have agreed before on what can be read."""
        if not self.ranked:
            self.store.delete_damaged({key for keys in request.keys for key in keys})

    def encode_missing(self, req: Any, request: ChunkRequest, row: torch.Tensor) -> None:
        """After a prefill: ask for the chunks that the store does not have.

        A first chunk that was computed plainly, behind exactly what it is to be encoded behind, is
        taken from the pool as it is; ``row`` has its slots.
        """
        if request.reason is not None and request.reason not in STILL_ENCODED:
            return
        ids = req.origin_input_ids
        for (start, end), keys, prefixes in zip(
            request.bounds, request.keys, request.encode_prefixes
        ):
            document = ids[start:end]
            for key, prefix in zip(keys, prefixes):
                if self.store.where(key) is not None:
                    self.versions.found_stored(key, document, request.tenant)
                elif not request.fused and tuple(ids[:start]) == prefix:
                    cache = model_view.row_cache(self.runner, row, len(ids))
                    chunk = capture(self.model, cache, document, start, prefix)
                    self.encoder.store_chunk(
                        key, chunk, request.salt, request.tenant, request.time_s
                    )
                else:
                    self.encoder.enqueue(document, prefix, request.salt, request.tenant)

    def earn_encoding(self, tokens: int) -> None:
        """Under load: a prefill of so many tokens pays for a share of them to be encoded, later."""
        owed = self.encode_credit + self.options.learn_share * tokens
        self.encode_credit = owed if self.encoder.busy else 0.0

    def spend_encoding(self, max_pieces: int | None = None) -> None:
        """Encode what was earned, at most ``max_pieces`` pieces.

        Before another forward, never between a prefill and its answer: who brings a document for
        the first time does not wait for it.
        """
        pieces = 0
        while self.encode_credit >= 1.0 and pieces != max_pieces:
            done = self.encode_piece()
            self.encode_credit = self.encode_credit - done if done else 0.0
            pieces += 1

    def encode_piece(self) -> int:
        """One piece of what waits; returns its tokens. A chunk that cannot be encoded is dropped."""
        try:
            return self.encoder.step(self.time_s)
        except Exception:
            logger.exception("canopy: a chunk could not be encoded; it is dropped")
            self.counts["fallbacks"] += 1
            self.encoder.abandon()
            return 0

    def document_command(self, verb: str, name: str, tenant: str | None) -> bool:
        """Pin, unpin or delete a tenant's document in every version.

        False where nothing of it is stored, nothing was pinned, or the tenant's pins are full.
        """
        if verb == "delete":
            self.encoder.forget(name, tenant)
            return self.versions.delete(name, tenant)
        do = self.versions.pin if verb == "pin" else self.versions.unpin
        return do(name, tenant)

    def stats(self) -> dict[str, Any]:
        """Counters since the start; tokens, bytes, requests."""
        return {
            **{name: self.counts[name] for name in COUNTERS},
            "not_fused": dict(self.not_fused),
            "store": self.store.stats(),
            **self.encoder.stats(),
            "pinned_bytes": sum(self.versions.pinned_bytes().values()),
            "pinned_chunks": len(self.versions.pinned_chunks),
            "read_ahead": self.reads.stats(),
            "ratios": dict(self.ratios),
        }
