"""The hooks on the forward path: around the worker's forward, and after the forward batch is made."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from sglang_canopy.chunk.server import ranks
from sglang_canopy.chunk.server.attention import FusedPlan
from sglang_canopy.chunk.server.engine import ChunkEngine
from sglang_canopy.chunk.server.fold import fold, tails
from sglang_canopy.chunk.server.windows import cut
from sglang_canopy.chunk.server.wish import Wish, wish_of

logger = logging.getLogger(__name__)

REPORT = "canopy_chunks"
"""The field of ``meta_info`` that tells what a request reused: a list with one object."""

Run = tuple[Any, FusedPlan]
"""A folded batch and its plan."""


def forward(original: Any, worker: Any, batch: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Around ``TpModelWorker.forward_batch_generation``.

    Batches without planned requests go through untouched, unless they were admitted as fused ones
    and hold more than a window. Whatever fails while planning is logged and counted, and the
    request is computed whole: nothing of a half-made plan is left in its slots.
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
    # A prefix that is being loaded back from the host is waited for where planning reads it.
    worker.set_hicache_consumer(batch.hicache_consumer_index)
    runs = _runs(engine, batch)
    if not runs:
        rows = most = int(batch.extend_num_tokens)
        result = original(worker, batch, *args, **kwargs)
    else:
        counted = [run.extend_num_tokens for run, _ in runs]
        rows, most = sum(counted), max(counted)
        engine.counts["split_batches"] += int(len(runs) > 1)
        for run, plan in runs[:-1]:
            _compute(worker, run, plan)
        run, plan = runs[-1]
        backend = worker.model_runner.attn_backend
        backend.canopy_plan = plan
        try:
            result = original(worker, run, *args, **kwargs)
        finally:
            backend.canopy_plan = None
    engine.counts["most_rows"] = max(engine.counts["most_rows"], most)
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


def _compute(worker: Any, run: Any, plan: FusedPlan) -> None:
    """A forward that is not the batch's last: its KV is written, nothing is sampled."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

    runner = worker.model_runner
    run.return_logprob = False
    run.extend_input_logprob_token_ids = None
    runner.attn_backend.canopy_plan = plan
    try:
        made = ForwardBatch.init_new(
            run,
            runner,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
        runner.forward(made)
    finally:
        runner.attn_backend.canopy_plan = None


def _runs(engine: ChunkEngine, batch: Any) -> list[Run]:
    """The folded batches to run in turn; none where SGLang's own forward does."""
    chosen, planned = _choose(engine, batch)
    try:
        runs = _folded(engine, batch, chosen, bool(planned))
    except Exception:
        logger.exception("canopy: a fused batch could not be made; it runs normally")
        for i in planned:
            _give_up(engine, batch.reqs[i])
        return _unplanned(engine, batch)
    for i in planned:
        _mark(batch.reqs[i])
    if planned:
        engine.counts["fused_batches"] += 1
        engine.counts["mixed_batches"] += int(batch.forward_mode.is_mixed())
    return runs


def _folded(
    engine: ChunkEngine, batch: Any, chosen: Sequence[torch.Tensor], fused: bool
) -> list[Run]:
    forwards = cut(chosen, engine.most_rows(max(map(len, chosen))), tails(batch))
    if not fused and len(forwards) == 1:
        return []
    table = engine.runner.req_to_token_pool.req_to_token
    return [fold(batch, table, rows) for rows in forwards]


def _unplanned(engine: ChunkEngine, batch: Any) -> list[Run]:
    """Every row of a batch whose plans were given up."""
    try:
        return _folded(engine, batch, [_window(batch, i) for i in range(len(batch.reqs))], False)
    except Exception:
        logger.exception("canopy: a batch could not be cut into windows; it runs as it is")
        engine.counts["fallbacks"] += 1
        return []


def _window(batch: Any, index: int) -> torch.Tensor:
    """The positions of a request's window, all of them."""
    return torch.arange(int(batch.prefix_lens[index]), int(batch.seq_lens_cpu[index]))


def _choose(engine: ChunkEngine, batch: Any) -> tuple[list[torch.Tensor], list[int]]:
    """The positions to compute of each request, and which requests reuse chunks in this batch."""
    table = engine.runner.req_to_token_pool.req_to_token
    chosen: list[torch.Tensor] = []
    planned, failed, tried = [], [], False
    for i, req in enumerate(batch.reqs):
        every, wish = _window(batch, i), wish_of(req)
        chosen.append(every)
        prefix, length = int(batch.prefix_lens[i]), int(batch.seq_lens_cpu[i])
        # A row at or past the prompt's end is a decode row of a mixed batch.
        if wish is None or prefix >= len(req.origin_input_ids) or not engine.may_fuse(req, wish):
            continue
        tried = True
        row = table[int(batch.req_pool_indices[i]), :length].long()
        try:
            rows = _rows(engine, req, wish, prefix, length, row)
        except Exception:
            logger.exception("canopy: planning failed; the request runs normally")
            failed.append(i)
            continue
        if rows is not None:
            chosen[i] = rows
            planned.append(i)
    if tried and engine.model.ranks is not None:
        failed = ranks.union(failed)
    for i in failed:
        _give_up(engine, batch.reqs[i])
        chosen[i] = _window(batch, i)
    return chosen, [i for i in planned if i not in failed]


def _rows(
    engine: ChunkEngine, req: Any, wish: Wish, prefix: int, length: int, row: torch.Tensor
) -> torch.Tensor | None:
    """The positions of this window to compute; ``None``: all of them."""
    if wish.plan is not None and prefix < wish.plan.prefix:
        wish.plan = None  # begun anew after a retraction, with less of a prefix
    if wish.plan is None:
        try:
            wish.plan = engine.plan(req, wish, prefix, row)
        finally:
            engine.reader.let_go(wish)
        if wish.plan is None:
            return None
        wish.limit = 0
    else:
        engine.spread(wish.plan, row, prefix, length)
    computed = wish.plan.computed[prefix:length]
    if not bool(computed.any()):  # a window must run one row; it is computed exactly
        computed = computed.clone()
        computed[-1] = True
    return computed.nonzero()[:, 0] + prefix


def _mark(req: Any) -> None:
    """Before reused KV could be published: the scheduler reads these marks after the forward."""
    wish = wish_of(req)
    assert wish is not None
    assert wish.plan is not None
    wish.fused = req.skip_radix_cache_insert = True
    for placed in wish.plan.placed[:1]:
        wish.exact = placed.start if wish.exact is None else min(wish.exact, placed.start)


def _give_up(engine: ChunkEngine, req: Any) -> None:
    """Planning failed: from here on every token of the request is computed.

    A request that never ran with reused KV is exact, and may enter the exact tree.
    """
    wish = wish_of(req)
    assert wish is not None
    engine.counts["fallbacks"] += 1
    wish.why, wish.plan = "planning failed", None
    engine.reasons[wish.why] += 1
    if not wish.fused:
        wish.report = {"fused": False, "why": wish.why}
    engine.drop_damaged(wish)


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
                if int(batch.prefix_lens[i]) < len(req.origin_input_ids):
                    wish.head = wish.exact or 0
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
