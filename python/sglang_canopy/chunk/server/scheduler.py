"""The scheduler's side: the engine is made at start, requests are marked, idle time is used."""

from __future__ import annotations

import logging
import time
from typing import Any

from sglang_canopy.chunk.server import attention, budget
from sglang_canopy.chunk.server.engine import ChunkEngine
from sglang_canopy.chunk.server.gate import apply_calibration, pass_gate
from sglang_canopy.chunk.server.options import ATTRIBUTE, COMMAND, Options
from sglang_canopy.chunk.server.ranks import first_says
from sglang_canopy.chunk.server.wish import wish_of
from sglang_canopy.errors import CanopyError

logger = logging.getLogger(__name__)

COMMANDS = ("pin", "unpin", "delete")


def build(original: Any, scheduler: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Around ``Scheduler.__init__``: the attention backends before, the engine after."""
    options: Options | None = getattr(server_args, ATTRIBUTE, None)
    if options is None:
        return original(scheduler, server_args, *args, **kwargs)
    attention.register()
    original(scheduler, server_args, *args, **kwargs)
    runner = scheduler.tp_worker.model_runner
    try:
        engine = ChunkEngine(runner, options, scheduler.tokenizer)
        if options.fuses:
            apply_calibration(engine, server_args.model_path)
            pass_gate(engine, scheduler.tokenizer)
    except CanopyError as error:
        raise SystemExit(f"sglang-canopy: --canopy-chunks on: {error}") from None
    engine.window_tokens = scheduler.chunked_prefill_size
    engine.prefill_tokens = scheduler.max_prefill_tokens
    runner.canopy_chunks = engine
    logger.info(
        "canopy: chunk reuse is on, mode %s, selector %s, ratio %s, model %s",
        options.mode,
        options.chosen_selector,
        options.chosen_ratio,
        engine.model.identity[:12],
    )
    return None


def engine_of(scheduler: Any) -> ChunkEngine | None:
    """The scheduler's chunk engine, or ``None`` where chunk reuse is off."""
    worker = getattr(scheduler, "tp_worker", None)
    return getattr(getattr(worker, "model_runner", None), "canopy_chunks", None)


def request_created(req: Any, scheduler: Any) -> None:
    """After ``Scheduler._create_generation_req``."""
    engine = engine_of(scheduler)
    if engine is None:
        return
    try:
        wish = req.canopy_chunks = engine.wish(req)
        if wish is not None:
            engine.read_ahead(wish)
    except Exception:
        logger.exception("canopy: a request's chunks could not be read; it runs normally")
        engine.counts["fallbacks"] += 1


def adder_class(found: type, scheduler: Any) -> type | None:
    """After ``Scheduler.get_prefill_adder_class``."""
    engine = engine_of(scheduler)
    if engine is None or not engine.options.fuses:
        return None
    made = budget.adder_class(found)
    made.canopy_engine = engine  # type: ignore[attr-defined]
    return made


def use_idle_time(scheduler: Any) -> None:
    """Before ``Scheduler.on_idle``: encode what waits, until something else comes."""
    engine = engine_of(scheduler)
    if engine is not None and engine.reader.coming and scheduler.is_fully_idle():
        engine.reader.clear()
    if engine is None or not engine.learner.busy:
        return
    socket = scheduler.ipc_channels.recv_from_tokenizer

    def nothing_comes() -> bool:
        return scheduler.is_fully_idle() and not (socket is not None and socket.poll(0))

    while engine.learner.busy and first_says(nothing_comes()):
        engine.encode_piece()


def flushed(success: Any, scheduler: Any) -> None:
    """After ``Scheduler.flush_cache``: the exact cache is gone; chunks stay unless weights changed."""
    engine = engine_of(scheduler)
    if engine is not None and success and engine.weights_changed():
        logger.info("canopy: the weights changed, so chunks begin anew")


def tell(result: Any, scheduler: Any) -> None:
    """After ``Scheduler.get_internal_state``: counters. Any client may read them, so nothing of one
    tenant's chunks is among them, neither addresses nor lengths."""
    engine = engine_of(scheduler)
    if engine is not None:
        result.internal_state["canopy_chunks"] = {
            **engine.stats(),
            "time_s": time.monotonic(),
        }


def command(original: Any, scheduler: Any, recv_req: Any) -> Any:
    """Around ``Scheduler.set_internal_state``: pin, unpin or delete a tenant's document."""
    asked = [k for k in recv_req.server_args if k.startswith(COMMAND)]
    engine = engine_of(scheduler)
    if engine is None or not asked:
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    done = False
    for one in asked:
        verb, _, rest = one.removeprefix(COMMAND).partition(":")
        name, _, tenant = rest.partition(":")
        if verb in COMMANDS:
            done |= engine.command(verb, name, tenant or None)
    return SetInternalStateReqOutput(updated=done)


def publish_head(req: Any, tree_cache: Any) -> None:
    """Before a request's KV is published or released: what precedes all reused KV is exact.

    Without this the system prompt would fall out of the exact tree for good once every request
    behind it is fused.
    """
    wish = wish_of(req)
    if wish is None or not wish.fused or req.kv is None or not req.kv.holds_kv:
        return
    head, wish.head = wish.head, 0
    if head > req.kv.cache_protected_len:
        wish.limit = head
        tree_cache.checkpoint(req, up_to=head)


def insert_guard(_cache: Any, req: Any, up_to: int) -> None:
    """Before ``UnifiedRadixCache.checkpoint_into_tree``: approximate KV never enters it."""
    wish = wish_of(req)
    assert wish is None or not wish.fused or up_to <= wish.limit, (
        f"request {req.rid} has reused chunk KV and would enter the exact prefix tree"
    )
