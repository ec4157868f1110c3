"""Chunk reuse around SGLang's scheduler: start, new requests, admission, idle time, commands.

``hooks.py`` calls these only if document reuse is enabled.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from canopy_chunks.calibration.saved import Setting, calibrated_ratios
from canopy_chunks.fuse.rows import never
from canopy_chunks.fuse.working_memory import working_memory
from canopy_chunks.quality.expected_kl import ExpectedKL, measure_scale
from canopy_chunks.quality.start_gate import Method, check_quality
from canopy_chunks.server import attention, kept
from canopy_chunks.server.engine import ChunkEngine
from canopy_chunks.server.library import reusable_tokens
from canopy_chunks.server.model_view import check_layout, first_ranks, served_shape
from canopy_chunks.server.options import DEFAULT_RATIO, Options
from canopy_chunks.server.request import PLANNING_FAILED, ChunkRequest, chunk_request_of
from sglang_canopy.errors import CanopyError

logger = logging.getLogger(__name__)

COMMANDS = ("pin", "unpin", "delete")
PAUSE_MS = 50
"""Pause between a batch and background work. A quick client's next turn arrives within it, and
would otherwise wait for the piece in progress."""


def build(
    original: Any, scheduler: Any, server_args: Any, options: Options, *args: Any, **kwargs: Any
) -> None:
    """Hook around ``Scheduler.__init__``: register attention backends, then build the engine."""
    attention.register()
    original(scheduler, server_args, *args, **kwargs)
    runner = scheduler.tp_worker.model_runner
    longest = options.longest_prompt(runner.model_config.context_len)
    options = dataclasses.replace(options, prompt_tokens=longest)
    try:
        engine = ChunkEngine(runner, options, scheduler.tokenizer)
        check_layout(runner, engine.model.shape)
        _calibrate_and_check(engine, scheduler.tokenizer, server_args.tp_size)
    except CanopyError as error:
        raise SystemExit(f"sglang-canopy: --canopy-chunks on: {error}") from None
    engine.window_tokens = scheduler.chunked_prefill_size
    engine.prefill_tokens = scheduler.max_prefill_tokens
    kept.announce_exact_only(scheduler.tree_cache)
    runner.canopy_chunks = engine
    logger.info(
        "canopy: documents are reused: selector %s, ratios %s, encoding %s, model %s",
        options.selector,
        sorted(ratios_in_use(options, engine.ratios)),
        "mixed" if engine.stand_ins else "prefix",
        engine.model.identity[:12],
    )


def pool_budget(
    original: Any, configurator: Any, budget: int, options: Options, **more: Any
) -> Any:
    """Hook around ``KVCacheConfigurator.config_from_budget``: leave memory for chunk reuse.

    SGLang converts free bytes into pool sizes there, at the start and again after CUDA graphs are
    captured. Ends the process if no memory would be left for the pool.
    """
    config = configurator.model_config
    shape = served_shape(configurator.model, config.hf_config)
    tokens = options.longest_prompt(config.context_len)
    beside = options.bytes_beside_pool(str(configurator.device))
    needed = working_memory(shape, configurator.model_dtype.itemsize, tokens, beside)
    if needed.total >= budget:
        raise SystemExit(
            f"sglang-canopy: --canopy-chunks on needs {needed} beside the KV pool, and only "
            f"{budget >> 20:,} MiB are free for both: lower prompt_tokens or the "
            "tiers' sizes, or raise --mem-fraction-static"
        )
    logger.info("canopy: chunk reuse leaves %s out of the KV pool", needed)
    return original(configurator, budget - needed.total, **more)


def _calibrate_and_check(engine: ChunkEngine, tokenizer: Any, tp_size: int) -> None:
    """Read the calibrated ratios, then run the quality gate at every ratio in use.

    Raises CanopyError.
    """
    options, model, runner = engine.options, engine.model, engine.runner
    engine.setting = Setting(
        model.identity, _chip(model.device), str(model.dtype).removeprefix("torch."), tp_size,
        runner.attn_backend.canopy_name,
    )  # fmt: skip
    engine.ratios = calibrated_ratios(options.calibration, engine.setting)
    method = Method(options.selector, options.encode)
    ratios = ratios_in_use(options, engine.ratios)
    check_quality(model, tokenizer, method, ratios, options.min_kept)
    if options.max_kl is not None:
        if tokenizer is None:
            raise CanopyError("max_kl needs a tokenizer; drop --skip-tokenizer-init")
        engine.measure_expected = functools.partial(expected_kl, engine, tokenizer)
        engine.expected = engine.measure_expected()


def expected_kl(engine: ChunkEngine, tokenizer: Any) -> ExpectedKL:
    """Measure the expected KL of the engine's current weights. Without a result the scale is NaN,
    and documents are computed in full."""
    scale, options = math.nan, engine.options
    try:
        scale = measure_scale(engine.model, tokenizer, options.selector, options.encode)
    except Exception:
        logger.exception("canopy: the expected KL could not be measured")
    scale = first_ranks(scale)
    logger.info("canopy: expected KL is %.2f times that of the fitted model", scale)
    return ExpectedKL(scale)


def ratios_in_use(options: Options, calibrated: Mapping[str, float]) -> set[float]:
    """Return every ratio that a request without its own may have (``ChunkEngine.ratio_for``)."""
    if options.ratio is not None:
        return {options.ratio}
    tiers = options.capacity_bytes()
    return {calibrated.get(tier, DEFAULT_RATIO) for tier in tiers}


def _chip(device: torch.device) -> str:
    """Return the name that a calibration is saved under: the chip, on a CPU with its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu-{torch.get_num_threads()}"


def request_created(engine: ChunkEngine, req: Any) -> None:
    """Hook after ``Scheduler._create_generation_req``."""
    try:
        request = req.canopy_chunks = engine.new_request(req)
        if request is not None:
            engine.library.read_ahead(request)
    except Exception:
        logger.exception("canopy: a request's chunks could not be read; it runs normally")
        engine.counts["fallbacks"] += 1


def request_queued(engine: ChunkEngine, req: Any) -> None:
    """Hook before ``Scheduler._add_request_to_queue``, initially and after each retraction."""
    request = chunk_request_of(req)
    if request is None:
        return
    try:
        kept.enter(engine, req, request)
    except Exception:
        logger.exception("canopy: a request's namespace could not be named; it runs normally")
        engine.counts["fallbacks"] += 1
        request.checked, request.reason = True, PLANNING_FAILED


def work_when_idle(engine: ChunkEngine, scheduler: Any) -> None:
    """Hook before ``Scheduler.on_idle``: encode and check until other work arrives."""
    if engine.library.reads.pending and scheduler.is_fully_idle():
        engine.library.reads.clear()
    if not engine.has_idle_work:
        return
    socket = scheduler.ipc_channels.recv_from_tokenizer

    def something_comes(wait_ms: int) -> bool:
        return not scheduler.is_fully_idle() or (socket is not None and bool(socket.poll(wait_ms)))

    while engine.has_idle_work:
        # Once per batch, even if a monitor reads the status in between.
        wait_ms = PAUSE_MS if engine.has_run else 0
        engine.has_run = False
        if first_ranks(something_comes(wait_ms)):
            return
        # Ranks would not stop at the same layer.
        come = never if engine.library.ranked else functools.partial(something_comes, 0)
        engine.work_when_idle(come)


def flushed(engine: ChunkEngine, success: Any) -> None:
    """Hook after ``Scheduler.flush_cache``. Chunks stay unless the weights changed."""
    if success and engine.weights_changed():
        logger.info("canopy: the weights changed, so a new chunk store begins")


def add_internal_state(engine: ChunkEngine, result: Any) -> None:
    """Hook after ``Scheduler.get_internal_state``: add the counters.

    Any client may read the counters. They include no addresses or lengths of a tenant's chunks.
    ``READ`` limits the rate of collection.
    """
    if engine.shown is None or engine.readings.take(None, time.monotonic()):
        setting = dataclasses.asdict(engine.setting) if engine.setting is not None else None
        engine.shown = {**engine.stats(), "setting": setting}
    result.internal_state["canopy_chunks"] = engine.shown


def run_commands(engine: ChunkEngine, commands: Sequence[str]) -> bool:
    """Pin, unpin or delete documents: ``VERB:ID:TENANT``. Returns whether the store changed."""
    done = False
    for command in commands:
        verb, _, rest = command.partition(":")
        name, _, tenant = rest.partition(":")
        if verb in COMMANDS:
            done |= engine.library.command(verb, name, tenant or None)
    return done


def complete_report(request: ChunkRequest) -> None:
    """Complete the report before a request's KV is inserted into the tree or released.

    Its forward is then done and the answer not yet sent.
    """
    if request.reported:
        request.finish_report()


def check_insert(request: ChunkRequest, req: Any) -> None:
    """Hook before ``UnifiedRadixCache.checkpoint_into_tree``.

    Raises RuntimeError if approximate KV would be inserted under a key that exact requests match.
    """
    if request.fused and not request.keeps(req):
        raise RuntimeError(
            f"request {req.rid} has reused KV of documents and would enter the exact prefix tree"
        )


@dataclass(frozen=True, slots=True)
class ExpectedReuse:
    """Expected reuse of a prompt: ``spans`` of stored chunks, and their ``ratio`` to compute."""

    spans: tuple[tuple[int, int], ...]
    ratio: float

    def saved(self, start: int, end: int) -> int:
        """Return the number of tokens of ``start..end`` that are expected to be reused."""
        return sum(
            math.floor((1.0 - self.ratio) * max(0, min(b, end) - max(a, start)))
            for a, b in self.spans
        )

    def credit(self, start: int, end: int, room: int | None) -> int:
        """Return the tokens to add to a window's ``room``, so that computed tokens fill it."""
        if room is None or end - start - self.saved(start, end) <= room:
            return self.saved(start, end)
        low, high = start, end  # find the last end whose computed tokens fit
        while high - low > 1:
            middle = (low + high) // 2
            if middle - start - self.saved(start, middle) <= room:
                low = middle
            else:
                high = middle
        return self.saved(start, low)


def expected_reuse(engine: ChunkEngine, req: Any) -> ExpectedReuse | None:
    """Return the expected reuse of a waiting request's prompt; ``None`` without reuse."""
    request = chunk_request_of(req)
    if request is None or not engine.may_fuse(req, request):
        return None
    chunks = engine.library.resolve(request)
    prefix = req.prefix_len + getattr(req, "host_hit_length", 0)
    if not reusable_tokens(chunks, prefix, len(req.full_untruncated_fill_ids)):
        return None
    spans = tuple((k.start, k.end) for k in chunks if k.tier is not None)
    return ExpectedReuse(spans, engine.ratio_for(request, chunks))


@functools.cache
def prefill_adder_class(stock: type) -> type:
    """SGLang's ``PrefillAdder``, but budgets are charged only for computed tokens.

    A fused prompt fills only its recomputed share of a window. Admission uses an expectation. If it
    is wrong (a chunk was evicted, a file is damaged), ``batch.split_into_windows`` splits the
    forward, so that no forward exceeds a window. The KV pool is charged in full, since every slot
    is needed. ``canopy_engine`` is set for each use of the class.
    """

    class ChunkPrefillAdder(stock):  # type: ignore[misc,valid-type]
        canopy_engine: ChunkEngine | None = None

        def add_one_req(self, req: Any, *args: Any, **kwargs: Any) -> Any:
            engine = type(self).canopy_engine
            found = expected_reuse(engine, req) if engine is not None else None
            if found is None:
                return super().add_one_req(req, *args, **kwargs)
            before = len(self.can_run_list)
            start = req.prefix_len + getattr(req, "host_hit_length", 0)
            end = len(req.full_untruncated_fill_ids)
            given = found.credit(start, end, self.rem_chunk_tokens)
            self._canopy_grant(given)
            result = super().add_one_req(req, *args, **kwargs)
            admitted = len(self.can_run_list) > before
            saved = found.saved(req.prefix_len, req.extend_end) if admitted else 0
            self._canopy_grant(min(saved, given) - given)
            return result

        def _canopy_grant(self, tokens: int) -> None:
            self.rem_input_tokens += tokens
            if self.rem_chunk_tokens is not None:
                self.rem_chunk_tokens += tokens

    return ChunkPrefillAdder
