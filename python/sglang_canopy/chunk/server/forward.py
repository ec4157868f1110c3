"""The hooks on the forward path: around the worker's forward, and after the forward batch is made."""

from __future__ import annotations

import logging
from typing import Any

import torch

from sglang_canopy.chunk.server.engine import ChunkEngine
from sglang_canopy.chunk.server.fold import fold
from sglang_canopy.chunk.server.wish import Wish, wish_of

logger = logging.getLogger(__name__)

REPORT = "canopy_chunks"
"""The field of ``meta_info`` that tells what a request reused: a list with one object."""


def forward(original: Any, worker: Any, batch: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Around ``TpModelWorker.forward_batch_generation``.

    Batches without planned requests go through untouched. Whatever fails while planning is logged
    and counted, and the batch runs normally: every slot is computed then, so nothing of a half-made
    plan is left.
    """
    engine: ChunkEngine | None = getattr(worker.model_runner, "canopy_chunks", None)
    if engine is not None and batch is not None and engine.credit >= 1.0:
        engine.spend(1 if batch.forward_mode.is_decode() else None)
    if (
        engine is None
        or batch is None
        or not batch.forward_mode.is_extend_without_speculative()
        or not any(wish_of(req) is not None for req in batch.reqs)
    ):
        return original(worker, batch, *args, **kwargs)
    rows = int(batch.extend_num_tokens)
    # A prefix that is being loaded back from the host is waited for where planning reads it.
    worker.set_hicache_consumer(batch.hicache_consumer_index)
    folded = _planned(engine, batch)
    if folded is None:
        result = original(worker, batch, *args, **kwargs)
    else:
        backend = worker.model_runner.attn_backend
        run, plan = folded
        backend.canopy_plan = plan
        engine.counts["fused_batches"] += 1
        engine.counts["mixed_batches"] += int(batch.forward_mode.is_mixed())
        rows = run.extend_num_tokens
        try:
            result = original(worker, run, *args, **kwargs)
        finally:
            backend.canopy_plan = None
    _afterwards(engine, batch, rows)
    return result


def after_init_new(
    forward_batch: Any, _cls: Any, _batch: Any, runner: Any, *_: Any, **__: Any
) -> None:
    """After ``ForwardBatch.init_new``: a fused batch's rows have their true positions."""
    plan = getattr(runner.attn_backend, "canopy_plan", None)
    if plan is not None:
        assert forward_batch.positions.shape == plan.positions.shape
        forward_batch.positions = plan.positions.to(forward_batch.positions.dtype)


def _planned(engine: ChunkEngine, batch: Any) -> tuple[Any, Any] | None:
    """The folded batch and its plan, or ``None`` where every row is computed."""
    table = engine.runner.req_to_token_pool.req_to_token
    chosen, fused = [], False
    for i, req in enumerate(batch.reqs):
        prefix, length = int(batch.prefix_lens[i]), int(batch.seq_lens_cpu[i])
        every = torch.arange(prefix, length)
        wish = wish_of(req)
        rows = None
        # A row at or past the prompt's end is a decode row of a mixed batch.
        at_prompt = wish is not None and prefix < len(req.origin_input_ids)
        if wish is not None and at_prompt and engine.may_fuse(req, wish):
            row = table[int(batch.req_pool_indices[i]), :length].long()
            rows = _rows(engine, req, wish, prefix, length, row)
        fused |= rows is not None
        chosen.append(every if rows is None else rows)
    if not fused:
        return None
    try:
        return fold(batch, table, chosen)
    except Exception:
        logger.exception("canopy: a fused batch could not be made; it runs normally")
        engine.counts["fallbacks"] += 1
        for req in batch.reqs:
            wish = wish_of(req)
            if wish is not None and wish.plan is not None:
                wish.plan.computed[:] = True
                wish.report = {"fused": False, "why": "planning failed"}
        return None


def _rows(
    engine: ChunkEngine, req: Any, wish: Wish, prefix: int, length: int, row: torch.Tensor
) -> torch.Tensor | None:
    """The positions of this window to compute; ``None``: all of them."""
    try:
        if wish.plan is not None and prefix < wish.plan.prefix:
            wish.plan = None  # begun anew after a retraction, with less of a prefix
        if wish.plan is None:
            try:
                wish.plan = engine.plan(req, wish, prefix, row)
            finally:
                engine.reader.let_go(wish)
            if wish.plan is None:
                return None
            # Before any of this KV could be published: the scheduler reads it after the forward.
            wish.fused = req.skip_radix_cache_insert = True
            wish.limit = 0
        else:
            engine.spread(wish.plan, row, prefix, length)
        computed = wish.plan.computed[prefix:length]
        if not bool(computed.any()):  # a window must run one row; it is computed exactly
            computed = computed.clone()
            computed[-1] = True
        return computed.nonzero()[:, 0] + prefix
    except Exception:
        logger.exception("canopy: planning failed; the request runs normally")
        engine.counts["fallbacks"] += 1
        if not wish.fused:
            wish.why = "planning failed"
            engine.reasons[wish.why] += 1
        wish.plan = None
        engine.drop_damaged(wish)
        return None


def _afterwards(engine: ChunkEngine, batch: Any, rows: int) -> None:
    """Prompts that are complete: tell what was reused, drop the plan, learn what was missing."""
    table = engine.runner.req_to_token_pool.req_to_token
    try:
        for i, req in enumerate(batch.reqs):
            wish = wish_of(req)
            if wish is None or int(batch.seq_lens_cpu[i]) < len(req.origin_input_ids):
                continue
            if wish.fused:
                assert req.skip_radix_cache_insert, "fused KV would enter the exact tree"
                if wish.plan is not None and wish.plan.placed:
                    wish.head = wish.plan.placed[0].start
            wish.plan = None
            if not wish.told:
                wish.told = True
                engine.reader.let_go(wish)
                report = wish.report or {"fused": False, "why": wish.why}
                req.customized_info = {**(req.customized_info or {}), REPORT: [report]}
                row = table[int(batch.req_pool_indices[i]), : len(req.origin_input_ids)].long()
                engine.learn_from(req, wish, row)
        engine.earn(rows)
    except AssertionError:
        raise
    except Exception:
        logger.exception("canopy: learning failed; it is skipped")
        engine.counts["fallbacks"] += 1
