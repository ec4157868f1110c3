"""Reuse of documents in one scheduler: plan requests, and write the plans' KV into slots."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from canopy_documents.calibration.saved import Setting
from canopy_documents.fuse.background_encoder import ShortBatchCounter, stand_in_tokens
from canopy_documents.fuse.cache import KVCache
from canopy_documents.fuse.choice import ChosenTokens
from canopy_documents.fuse.placement import place_chunks
from canopy_documents.fuse.rows import always_false, piece_tokens
from canopy_documents.fuse.selectors import make_selector
from canopy_documents.fuse.transfer import start_transfer
from canopy_documents.quality.checker import QualityChecker
from canopy_documents.quality.tenant_limits import STOPPED, QualityLimits, ratio_at
from canopy_documents.server import model_view
from canopy_documents.server.attention import fuses
from canopy_documents.server.library import Library, reason_not_reused, reusable_tokens
from canopy_documents.server.options import DEFAULT_RATIO, ReuseOptions
from canopy_documents.server.plan import PromptSlots, choose_tokens, replan
from canopy_documents.server.request import (
    COUNTERS,
    DIFFERED,
    STILL_ENCODED,
    DocumentRequest,
    ResolvedDocument,
    ReusePlan,
    fused_report,
    ineligible_reason,
    kept_report,
    make_document_request,
    normal_report,
    reused_by_tier,
)
from canopy_documents.store.chunk import PlacedChunk, base_and_skip
from canopy_documents.store.host_memory import HostChunk
from canopy_documents.text.fields import parse_fields
from sglang_canopy.errors import CanopyError
from sglang_canopy.storage.weights import WEIGHTS
from sglang_canopy.tenant import tenant_namespace, tenant_of_req
from sglang_canopy.wire.hints import TenantRate
from sglang_canopy.wire.request_state import state_of
from sglang_canopy.wire.stamp import BOUNDS, read_time

READINGS_PER_S, READING_BURST = 5.0, 20
"""Readings of counters, of all clients together."""


class DocumentEngine:
    """Plans requests and places reused KV. One per scheduler, at ``model_runner.canopy``.

    window_tokens, prefill_tokens: SGLang's bounds of one forward; has_run: a batch ran after the
    latest idle work; ratios: calibrated recompute ratio by tier; count_matched_tokens: returns the tokens of a
    request that SGLang's tree holds under an extra key. Raises CanopyError for a model or an attention
    backend that cannot fuse.
    """

    def __init__(self, runner: Any, options: ReuseOptions, tokenizer: Any = None) -> None:
        if not fuses(runner.attn_backend):
            raise CanopyError(
                f"the attention backend {type(runner.attn_backend).__name__} cannot fuse; use "
                "--attention-backend torch_native on a CPU, or fa3, flashinfer or triton on a GPU"
            )
        self.runner, self.options = runner, options
        self.end_token = None if tokenizer is None else tokenizer.eos_token_id
        self.stand_ins = stand_in_tokens(tokenizer)
        # The digest of the weight files is needed only if KV outlives this process.
        outlives_process = self.options.disk_mb or self._writes_kept_kv()
        self._files = model_view.weight_files(runner) if outlives_process else ""
        # Stopped tenants are forgotten with this process, so KV kept on a storage ends
        # with it too.
        self.process_id = (
            model_view.answer_of_first_rank(secrets.token_hex(8)) if self._writes_kept_kv() else ""
        )
        self._seen_weights_id = WEIGHTS.id
        self.library = Library(model_view.served_model(runner, self._files), options)
        self.checker = self._new_checker()
        self.counts: Counter[str] = Counter()
        self.not_fused: Counter[str] = Counter()
        self.time_s = 0.0
        self.has_run = False
        self.short_batches = ShortBatchCounter()
        self.window_tokens: int | None = None
        self.prefill_tokens: int | None = None
        self.ratios: dict[str, float] = {}
        self.count_matched_tokens: Callable[[Any, str | None], int] = lambda req, key: 0
        """On a server ``kept.count_matched_tokens`` of the scheduler's tree."""
        self.setting: Setting | None = None
        self.readings = TenantRate(READINGS_PER_S, READING_BURST)
        self.last_reading: dict[str, Any] | None = None
        """Counters of the last reading."""

    def _new_checker(self) -> QualityChecker:
        piece = piece_tokens(self.library.model.device)
        return QualityChecker(QualityLimits(), self.end_token, piece)

    @property
    def model(self) -> Any:
        return self.library.model

    def max_rows(self, longest_tokens: int) -> int:
        """Return the tokens that one forward may compute, as in SGLang's own admission.

        longest_tokens: of the batch's longest request, which runs whole without chunked prefill.
        """
        if self.window_tokens is not None:
            return self.window_tokens
        return max(longest_tokens, self.prefill_tokens or (1 << 62))

    def _writes_kept_kv(self) -> bool:
        """Whether SGLang writes kept KV to a storage."""
        return bool(self.runner.server_args.hicache_storage_backend)

    def follow_updates(self) -> None:
        """Start a new store if the weights were updated, whether or not the cache was flushed.

        Call it before documents are looked up or encoded, at the same points on all ranks.
        """
        if self._seen_weights_id != WEIGHTS.id:
            self.replace_if_weights_changed()

    def replace_if_weights_changed(self) -> bool:
        """Replace the store if the model's identity has changed, since the KV depends on the
        weights. Returns whether it has."""
        self._seen_weights_id = WEIGHTS.id
        model = model_view.served_model(self.runner, self._files)
        if model.identity == self.model.identity:
            return False
        self.library = Library(model, self.options, self.library)
        self.checker = self._new_checker()
        return True

    def new_request(self, req: Any) -> DocumentRequest | None:
        """Return the document state of a new request; ``None`` if it has no documents."""
        self.follow_updates()
        params = state_of(req).params
        self.time_s = max(self.time_s, read_time(params))
        if BOUNDS not in params:
            return None
        try:
            requested = parse_fields(params)
        except CanopyError:  # did not pass the HTTP entry, which refuses malformed fields
            self.not_fused["malformed"] += 1
            return None
        if requested.off:
            self.not_fused["off"] += 1
            return None
        request = make_document_request(
            list(req.origin_input_ids), requested, self.options, self.stand_ins, self.library.store,
            salt=tenant_namespace(req.extra_key, req.cache_salt).hex(),
        )  # fmt: skip
        request.tenant, request.time_s = tenant_of_req(req), self.time_s
        request.deletions = self.library.deletions
        return request

    def is_eligible(self, req: Any, request: DocumentRequest) -> bool:
        """Return whether a request may reuse documents. Decided on the first call.

        It cannot be decided when the request is created: SGLang sets some of its fields later.
        """
        if not request.is_decided:
            request.is_decided = True
            request.quality_level = self.checker.limits.quality_level(request.tenant)
            request.reason = ineligible_reason(req, request, self.options)
            if request.reason is None and request.ratio != 1 and request.quality_level == STOPPED:
                request.reason = DIFFERED
        return request.reason is None

    def may_fuse(self, req: Any, request: DocumentRequest) -> bool:
        """Return whether a request may be fused now: it is eligible, and its KV is exact or in a
        separate namespace."""
        return self.is_eligible(req, request) and (request.is_apart(req) or self.is_exact(request))

    def is_exact(self, request: DocumentRequest) -> bool:
        """Return whether an eligible request recomputes its prompt whatever the store holds."""
        if request.ratio is not None:
            return request.ratio >= 1.0
        return ratio_at(request.quality_level, self.options.ratio or 0.0) >= 1.0

    def ratio_for(self, request: DocumentRequest, documents: Sequence[ResolvedDocument]) -> float:
        """Return the recompute ratio: the request's, else the operator's, else the calibrated one.

        The calibrated ratio is that of the slowest tier among the documents. The last two are raised
        if the tenant's checked answers differed too often.
        """
        if request.ratio is not None:
            return request.ratio
        return ratio_at(request.quality_level, self.server_ratio(documents))

    def server_ratio(self, documents: Sequence[ResolvedDocument]) -> float:
        """Return the server's ratio for a prompt, regardless of the request's own ratio and its
        tenant."""
        tiers = {d.tier for d in documents if d.tier is not None}
        tier_ratios = [self.ratios[tier] for tier in tiers if tier in self.ratios]
        fixed_ratio = self.options.ratio
        return max(tier_ratios, default=DEFAULT_RATIO) if fixed_ratio is None else fixed_ratio

    def plan(
        self, req: Any, request: DocumentRequest, prefix_tokens: int, row: torch.Tensor
    ) -> ReusePlan | None:
        """Plan a request's prompt, at its first window. Returns ``None`` if it runs normally.

        row: the slots allocated so far, by position; prefix_tokens: how many of them hold KV from the tree.
        """
        start_s = time.perf_counter()
        ids = torch.tensor(list(req.full_untruncated_fill_ids), dtype=torch.long)
        documents = self.library.resolve(request)
        if reusable_tokens(documents, prefix_tokens, len(ids)):
            documents = self.library.load(request, req.full_untruncated_fill_ids)
        if not reusable_tokens(documents, prefix_tokens, len(ids)):
            if not request.kept_tokens:
                request.reason = reason_not_reused(documents, prefix_tokens)
                request.report = normal_report(request, prefix_tokens, documents, request.reason)
            return None
        placed = tuple(p for d in documents if (p := d.placed_from(prefix_tokens)) is not None)
        ratio = self.ratio_for(request, documents)
        plan = self._make_plan(request, PromptSlots(ids, row, prefix_tokens, placed), ratio)
        if not request.is_reported:
            planning_s = time.perf_counter() - start_s
            report = fused_report(request, documents, plan, ratio, planning_s)
            self._count(report)
            request.report = report
            request.complete_report = lambda: report.update(reused_by_tier(documents, plan))
        return plan

    def saved_tokens(self, request: DocumentRequest, prefix_tokens: int, total: int) -> float:
        """Return the tokens of a prompt that its stored documents would save after a prefix."""
        documents = self.library.resolve(request)
        usable = reusable_tokens(documents, prefix_tokens, total)
        return (1.0 - self.ratio_for(request, documents)) * usable

    def report_prompt(self, req: Any, request: DocumentRequest) -> dict[str, Any]:
        """Return the report of a complete prompt, and count it."""
        self.counts["kept_requests"] += int(request.kept_tokens > 0)
        self.counts["kept_tokens"] += request.kept_tokens
        documents, prefix_tokens = self.library.resolve(request), request.prefix_tokens
        if not request.report and request.kept_tokens:
            ratio = self.ratio_for(request, documents)
            total = len(req.origin_input_ids)
            request.report = kept_report(request, documents, prefix_tokens, total, ratio)
        elif not request.report:
            why = request.reason or reason_not_reused(documents, prefix_tokens)
            request.report = normal_report(request, prefix_tokens, documents, why)
        if not request.report["fused"]:
            self.not_fused[request.report["why"]] += 1
        return request.report

    def _make_plan(self, request: DocumentRequest, slots: PromptSlots, ratio: float) -> ReusePlan:
        """Choose the tokens to recompute, and start to write the reused KV.

        A retracted request keeps its earlier choice.
        """
        n, row, prefix_tokens = len(slots.ids), slots.row, slots.prefix_tokens
        nothing = ChosenTokens(torch.zeros(n, dtype=torch.bool))
        plan = ReusePlan(nothing, slots.placed, prefix_tokens)
        in_place = False
        if request.first_choice is None:
            plan.chosen, in_place = choose_tokens(
                self.model,
                self.runner,
                slots,
                make_selector(self.options.selector),
                ratio,
                plan.transfers,
            )
            request.first_choice = plan.chosen, prefix_tokens
        else:
            self.counts["replanned_requests"] += 1
            chosen, earlier_prefix = request.first_choice
            earlier = chosen.mask().clone()
            earlier[:earlier_prefix] = True
            plan.chosen = ChosenTokens(replan(earlier, prefix_tokens, slots.placed, n))
        if not in_place:
            self.write_reused(plan, row, prefix_tokens, min(n, row.numel()))
        return plan

    def _count(self, report: dict[str, Any]) -> None:
        self.counts["fused_requests"] += 1
        self.counts["reused_tokens"] += report["reused"]
        self.counts["recomputed_tokens"] += report["recomputed"]

    def correct_report(self, request: DocumentRequest, computed: int) -> None:
        """Correct report and counters: ``computed`` tokens that were planned as reused are computed
        instead."""
        for key, delta in (("reused", -computed), ("recomputed", computed), ("computed", computed)):
            if key in request.report:
                request.report[key] += delta
        self.counts["reused_tokens"] -= computed
        self.counts["recomputed_tokens"] += computed

    def write_reused(self, plan: ReusePlan, row: torch.Tensor, first: int, end: int) -> None:
        """Write the reused KV of positions ``first..end`` of the plan into the row's slots."""
        placed: Sequence[PlacedChunk] = plan.placed
        keys, values = model_view.pool_views(self.runner)
        cache = KVCache(keys, values, row, transfers=plan.transfers)
        is_whole_prompt = (first, end) == (plan.prefix_tokens, plan.chosen.total)
        if is_whole_prompt and not plan.chosen.is_on_host:
            transfer = start_transfer(self.model, placed, cache, plan.chosen.reused_rows(first))
            plan.transfers += [transfer] if transfer is not None else []
            placed = [p for p in placed if not isinstance(base_and_skip(p.chunk)[0], HostChunk)]
        if not placed:
            return
        needed = ~plan.computed
        needed[:first] = False
        needed[end:] = False
        place_chunks(self.model, placed, cache, needed)

    def offer_check(self, req: Any, request: DocumentRequest) -> None:
        """Offer a complete prompt for the quality check, unless the request set its own ratio.

        A turn that only extends kept KV counts like any other.
        """
        if request.ratio is None and (request.is_fused or request.reason == DIFFERED):
            ratio = self.server_ratio(self.library.resolve(request))
            if ratio < 1:
                self.checker.offer(req.origin_input_ids, request, ratio)

    def work_before_batch(self, tokens: int) -> None:
        """Encode and check what prefills have earned, never between a prefill and its answer.

        ``tokens``: prompt tokens of the batch, 0 if it decodes.
        """
        self.has_run = True
        self.follow_updates()
        encoder = self.library.encoder
        credit = self.library.encode_credit if encoder.busy else self.checker.budget_tokens
        if self.short_batches.lets_pass(tokens, credit, encoder.piece_tokens):
            return
        if encoder.busy:
            self.checker.interrupt(self.time_s)  # the encoder needs the check's memory
            self.library.spend_encoding(tokens)
        else:
            self.checker.run_within_budget(self.library, self.time_s, tokens)

    @property
    def has_idle_work(self) -> bool:
        """Return whether there is work for idle time."""
        return self.library.encoder.busy or self.checker.busy

    def work_when_idle(self, has_request_come: Callable[[], bool] = always_false) -> None:
        """Do one piece of idle work. Encoding has priority over checks.

        has_request_come: whether a request waits; the piece then ends before its next layer, to be
        repeated.
        """
        self.follow_updates()
        self.library.stop.has_request_come = has_request_come
        try:
            if self.library.encoder.busy:
                self.library.encode_piece()
            else:
                self.checker.run_piece(self.library, self.time_s)
        finally:
            self.library.stop.has_request_come = always_false

    def encode_missing(self, req: Any, request: DocumentRequest, row: torch.Tensor) -> None:
        """Enqueue the documents that the store lacks, after a prefill with slots ``row``."""
        if request.reason is None or request.reason in STILL_ENCODED:
            ids = req.origin_input_ids
            self.library.encode_missing(
                ids, request, lambda: model_view.row_cache(self.runner, row, len(ids))
            )

    def counters(self) -> dict[str, Any]:
        """Return the counters since the start and the store's sizes. Safe on any thread."""
        counters = {name: self.counts[name] for name in COUNTERS}
        counters["fallbacks"] += self.library.failures
        return {
            **counters,
            "not_fused": dict(self.not_fused),
            "quality": self.checker.stats(),
            "store": self.library.store.stats(),
        }

    def stats(self) -> dict[str, Any]:
        """Return all counters: tokens, bytes, requests. For the scheduler's thread only."""
        return {**self.counters(), **self.library.encoder.stats(), "ratios": dict(self.ratios)}
