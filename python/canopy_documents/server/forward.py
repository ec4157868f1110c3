"""Hooks on the forward path: around the worker's forward, and after the forward batch is built."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from canopy_documents.server.attention import FusedAttention
from canopy_documents.server.batch import count_logit_rows, pack_rows, split_into_windows
from canopy_documents.server.engine import DocumentEngine
from canopy_documents.server.model_view import on_any_rank
from canopy_documents.server.request import (
    PLANNING_FAILED,
    DocumentRequest,
    document_request_of,
    engine_of_runner,
)
from sglang_canopy.wire.stamp import DOCUMENTS

logger = logging.getLogger(__name__)

FusedRun = tuple[Any, FusedAttention]
"""A packed batch and its attention."""


def forward(original: Any, worker: Any, batch: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Hook around ``TpModelWorker.forward_batch_generation``.

    Batches without planned requests run unchanged, unless they were admitted as fused batches and
    hold more than one window. A failure while planning is logged and counted, and the request is
    computed whole: no part of the unfinished plan stays in its slots.
    """
    engine = engine_of_runner(worker.model_runner)
    if engine is None or batch is None:
        return original(worker, batch, *args, **kwargs)
    extends = batch.forward_mode.is_extend_without_speculative()
    engine.work_before_batch(int(batch.extend_num_tokens) if extends else 0)
    if not extends or not any(document_request_of(req) is not None for req in batch.reqs):
        return original(worker, batch, *args, **kwargs)
    # Planning reads the prefix, so wait here if the prefix is being loaded from the host.
    worker.set_hicache_consumer(batch.hicache_consumer_index)
    runs = _packed_runs(engine, batch)
    if not runs:
        row_count = longest_run_tokens = int(batch.extend_num_tokens)
        result = original(worker, batch, *args, **kwargs)
    else:
        run_tokens = [packed.extend_num_tokens for packed, _ in runs]
        row_count, longest_run_tokens = sum(run_tokens), max(run_tokens)
        engine.counts["split_batches"] += int(len(runs) > 1)
        for packed, fused_attention in runs[:-1]:
            _run_without_sampling(worker, packed, fused_attention)
        packed, fused_attention = runs[-1]
        backend = worker.model_runner.attn_backend
        backend.canopy.fused_attention = fused_attention
        try:
            result = original(worker, packed, *args, **kwargs)
        finally:
            backend.canopy.fused_attention = None
            for transfer in fused_attention.transfers:
                transfer.finish()  # also after a failed forward: its slots are not free before
    engine.counts["most_rows"] = max(engine.counts["most_rows"], longest_run_tokens)
    _finish_prompts(engine, batch, row_count)
    return result


def set_positions(
    forward_batch: Any, _cls: Any, _batch: Any, runner: Any, *_: Any, **__: Any
) -> None:
    """Hook after ``ForwardBatch.init_new``: give a fused batch's rows their true positions."""
    if engine_of_runner(runner) is None:
        return
    fused_attention = runner.attn_backend.canopy.fused_attention
    if fused_attention is not None:
        assert forward_batch.positions.shape == fused_attention.positions.shape
        forward_batch.positions = fused_attention.positions.to(forward_batch.positions.dtype)


def _run_without_sampling(worker: Any, packed: Any, fused_attention: FusedAttention) -> None:
    """Run a forward that is not the batch's last: write its KV without sampling."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

    runner = worker.model_runner
    packed.return_logprob = False
    packed.extend_input_logprob_token_ids = None
    runner.attn_backend.canopy.fused_attention = fused_attention
    try:
        forward_batch = ForwardBatch.init_new(
            packed,
            runner,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
        runner.forward(forward_batch)
    finally:
        runner.attn_backend.canopy.fused_attention = None


def _packed_runs(engine: DocumentEngine, batch: Any) -> list[FusedRun]:
    """Return the packed batches to run in turn; empty if SGLang's own forward runs the batch."""
    chosen_positions, planned_indices = _choose_positions(engine, batch)
    try:
        plans = [document_request_of(batch.reqs[i]).plan for i in planned_indices]  # type: ignore[union-attr]
        transfers = [transfer for plan in plans if plan is not None for transfer in plan.transfers]
        runs = _pack(engine, batch, chosen_positions, bool(planned_indices), transfers)
    except Exception:
        logger.exception("canopy: a fused batch could not be made; it runs normally")
        for i in planned_indices:
            _fall_back(engine, batch, i)
        return _pack_whole(engine, batch)
    for i in planned_indices:
        _mark_fused(batch.reqs[i])
    if planned_indices:
        engine.counts["fused_batches"] += 1
        engine.counts["mixed_batches"] += int(batch.forward_mode.is_mixed())
    return runs


def _pack(
    engine: DocumentEngine,
    batch: Any,
    positions_by_request: Sequence[torch.Tensor],
    must_pack: bool,
    transfers: Sequence[Any] = (),
) -> list[FusedRun]:
    max_rows = engine.max_rows(max(map(len, positions_by_request)))
    windows = split_into_windows(positions_by_request, max_rows, count_logit_rows(batch))
    if not must_pack and len(windows) == 1:
        return []
    table = engine.runner.req_to_token_pool.req_to_token
    return [pack_rows(batch, table, positions, transfers) for positions in windows]


def _pack_whole(engine: DocumentEngine, batch: Any) -> list[FusedRun]:
    """Pack every row of a batch whose plans were dropped."""
    try:
        all_positions = [_window_positions(batch, i) for i in range(len(batch.reqs))]
        return _pack(engine, batch, all_positions, False)
    except Exception:
        logger.exception("canopy: a batch could not be cut into windows; it runs as it is")
        engine.counts["fallbacks"] += 1
        return []


def _window_positions(batch: Any, index: int) -> torch.Tensor:
    """Return all positions of a request's window."""
    return torch.arange(int(batch.prefix_lens[index]), int(batch.seq_lens_cpu[index]))


def _slots_of_request(engine: DocumentEngine, batch: Any, index: int, count: int) -> torch.Tensor:
    """Return the pool slots of a request's first ``count`` tokens."""
    table = engine.runner.req_to_token_pool.req_to_token
    return table[int(batch.req_pool_indices_cpu[index]), :count].long()


def _choose_positions(engine: DocumentEngine, batch: Any) -> tuple[list[torch.Tensor], list[int]]:
    """Return each request's positions to compute, and the requests that reuse documents here."""
    chosen_positions: list[torch.Tensor] = []
    planned_indices, failed_indices, any_planned = [], [], False
    for i, req in enumerate(batch.reqs):
        chosen_positions.append(_window_positions(batch, i))
        if (request := _prefilling_request(batch, i)) is not None:
            request.begin_window(req, int(batch.prefix_lens[i]), int(batch.seq_lens_cpu[i]))
        request = _fusable_request(engine, batch, i)
        if request is None:
            continue
        prefix_tokens, length = int(batch.prefix_lens[i]), int(batch.seq_lens_cpu[i])
        any_planned = True
        slots = _slots_of_request(engine, batch, i, length)
        try:
            positions = _positions_to_compute(engine, req, request, prefix_tokens, length, slots)
        except Exception:
            logger.exception("canopy: planning failed; the request runs normally")
            failed_indices.append(i)
            continue
        if positions is not None:
            chosen_positions[i] = positions
            planned_indices.append(i)
    if any_planned and engine.model.ranks is not None:
        failed_indices = on_any_rank(failed_indices, len(batch.reqs))
    for i in failed_indices:
        _fall_back(engine, batch, i)
        chosen_positions[i] = _window_positions(batch, i)
    return chosen_positions, [i for i in planned_indices if i not in failed_indices]


def _prefilling_request(batch: Any, index: int) -> DocumentRequest | None:
    """Return a request's document state if this batch has rows of its prompt.

    A row at or past the prompt's end is a decode row of a mixed batch.
    """
    req = batch.reqs[index]
    request = document_request_of(req)
    if request is None or int(batch.prefix_lens[index]) >= len(req.origin_input_ids):
        return None
    return request


def _fusable_request(engine: DocumentEngine, batch: Any, index: int) -> DocumentRequest | None:
    """Return :func:`_prefilling_request` if the rows may be fused, else ``None``."""
    request = _prefilling_request(batch, index)
    if request is None or not engine.may_fuse(batch.reqs[index], request):
        return None
    return request


def _positions_to_compute(
    engine: DocumentEngine,
    req: Any,
    request: DocumentRequest,
    prefix_tokens: int,
    length: int,
    slots: torch.Tensor,
) -> torch.Tensor | None:
    """Return the positions of this window to compute; ``None`` for all.

    If the window holds the whole prompt, the chosen positions stay on their device. For a part of
    the prompt the host must wait for their number.
    """
    if request.plan is not None and prefix_tokens < request.plan.prefix_tokens:
        request.plan = None  # restarted after a retraction, with a shorter prefix
    if request.plan is None:
        request.plan = engine.plan(req, request, prefix_tokens, slots)
        if request.plan is None:
            return None
    else:
        engine.write_reused(request.plan, slots, prefix_tokens, length)
    if prefix_tokens == request.plan.prefix_tokens and length == request.plan.chosen.total:
        return request.plan.chosen.rows()
    computed = request.plan.computed[prefix_tokens:length]
    if not bool(computed.any()):  # a window must run at least one row, which is then exact
        computed = computed.clone()
        computed[-1] = True
    return computed.nonzero()[:, 0] + prefix_tokens


def _mark_fused(req: Any) -> None:
    """Record, before the forward, whether the request's slots hold approximate KV."""
    request = document_request_of(req)
    assert request is not None
    assert request.plan is not None
    if not request.plan.computes_all:
        request.is_fused = True


def _fall_back(engine: DocumentEngine, batch: Any, index: int) -> None:
    """Compute every further token of a request whose planning failed.

    A request that never ran with reused KV is exact, and may enter the exact tree.
    """
    request = document_request_of(batch.reqs[index])
    assert request is not None
    if request.plan is not None and not request.is_reported:
        engine.correct_report(request, request.plan.compute_from(int(batch.prefix_lens[index])))
    memory = engine.library.store.memory
    if memory is not None:  # a transfer in flight would overwrite computed KV
        memory.finish()
    engine.counts["fallbacks"] += 1
    request.reason, request.plan = PLANNING_FAILED, None
    if not request.is_fused:
        request.report = {"fused": False, "why": request.reason}


def _finish_prompts(engine: DocumentEngine, batch: Any, row_count: int) -> None:
    """For each complete prompt, report the reuse, drop the plan and enqueue missing documents."""
    for i, req in enumerate(batch.reqs):
        request = document_request_of(req)
        if request is None or int(batch.seq_lens_cpu[i]) < len(req.origin_input_ids):
            continue
        if request.is_fused and not request.is_apart(req):
            raise RuntimeError(f"reused KV of request {req.rid} would enter the exact tree")
        if not request.is_reported:
            request.is_reported = True
            report = engine.report_prompt(req, request)
            if request.plan is not None and request.plan.chosen.is_on_host:
                request.finish_report()
            req.customized_info = {**(req.customized_info or {}), DOCUMENTS: [report]}
            slots = _slots_of_request(engine, batch, i, len(req.origin_input_ids))
            _attempt(engine, engine.encode_missing, req, request, slots)
            _attempt(engine, engine.offer_check, req, request)
        request.plan = None
    _attempt(engine, engine.library.earn_encoding, row_count)
    engine.checker.add_budget(row_count)


def _attempt(engine: DocumentEngine, work: Callable[..., None], *args: Any) -> None:
    """Run work for later requests. A failure is logged and counted; this batch is unaffected."""
    try:
        work(*args)
    except AssertionError:
        raise
    except Exception:
        logger.exception("canopy: documents could not be encoded for later; they are skipped")
        engine.counts["fallbacks"] += 1
