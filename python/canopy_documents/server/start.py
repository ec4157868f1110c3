"""Start of document reuse in a scheduler: memory beside the pool, the engine, quality and ratios."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from canopy_documents import document_options_of
from canopy_documents.calibration.saved import Setting, calibrated_ratios
from canopy_documents.fuse.selectors.question import MAX_QUERIES
from canopy_documents.quality.start_check import check_quality
from canopy_documents.server import attention, kept
from canopy_documents.server.engine import DocumentEngine
from canopy_documents.server.model_view import check_layout, served_shape
from canopy_documents.server.options import DEFAULT_RATIO, ReuseOptions
from canopy_documents.store.chunk import Shape
from sglang_canopy.errors import CanopyError

MAX_PREFIX_TOKENS = 3584
"""Maximum tokens before an encoded document: system text and stand-ins. Their KV is computed with
the document, in the same cache."""


@dataclass(frozen=True, slots=True)
class WorkingMemory:
    """Bytes to reserve, by use; ``prompt_tokens``: the longest prompt that reuses documents.

    tier_bytes: documents in the pool's own memory; cache_bytes: KV outside the pool, of one prompt
    that is planned in several windows, and of one document being encoded; probe_bytes: scores, and
    the keys and values that a probe reads.
    """

    prompt_tokens: int
    tier_bytes: int
    cache_bytes: int
    probe_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.tier_bytes + self.cache_bytes + self.probe_bytes

    def __str__(self) -> str:
        sizes = (self.total_bytes, self.tier_bytes, self.cache_bytes, self.probe_bytes)
        total, tiers, caches, probe = (size >> 20 for size in sizes)
        return (
            f"{total:,} MiB ({tiers:,} for documents, {caches:,} for caches beside the pool, "
            f"{probe:,} for probes, at prompts of {self.prompt_tokens:,} tokens)"
        )


def reserved_memory(shape: Shape, itemsize: int, prompt_tokens: int, tiers: int) -> WorkingMemory:
    """Return the memory for a model of ``shape`` with ``itemsize`` bytes per element."""
    tokens = 2 * prompt_tokens + MAX_PREFIX_TOKENS
    cache_bytes = tokens * shape.kv_elements_per_token * itemsize
    score_bytes = 2 * 4 * shape.heads * MAX_QUERIES * prompt_tokens  # around the softmax, in fp32
    kv_bytes = (
        4 * 4 * shape.kv_heads * shape.head_dim * prompt_tokens
    )  # K and V, as read and in fp32
    return WorkingMemory(prompt_tokens, tiers, cache_bytes, score_bytes + kv_bytes)


logger = logging.getLogger(__name__)


def build(original: Any, scheduler: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Hook around ``Scheduler.__init__``: register attention backends, then build the engine."""
    options = document_options_of(server_args)
    if options is None:
        original(scheduler, server_args, *args, **kwargs)
        return
    attention.register()
    original(scheduler, server_args, *args, **kwargs)
    runner = scheduler.tp_worker.model_runner
    longest = options.max_prompt_tokens(runner.model_config.context_len)
    options = dataclasses.replace(options, prompt_tokens=longest)
    try:
        engine = DocumentEngine(runner, options, scheduler.tokenizer)
        check_layout(runner, engine.model.shape)
        _calibrate_and_check(engine, scheduler.tokenizer, server_args.tp_size)
    except CanopyError as error:
        raise SystemExit(f"sglang-canopy: --canopy-documents on: {error}") from None
    engine.window_tokens = scheduler.chunked_prefill_size
    engine.prefill_tokens = scheduler.max_prefill_tokens
    engine.count_matched_tokens = functools.partial(kept.count_matched_tokens, scheduler.tree_cache)
    kept.omit_approximate_events(scheduler.tree_cache)
    runner.canopy = engine
    logger.info(
        "canopy: documents are reused: selector %s, ratios %s, %s stand-in tokens, model %s",
        options.selector,
        sorted(ratios_in_use(options, engine.ratios)),
        len(engine.stand_ins[-1]) if engine.stand_ins else "no",
        engine.model.identity[:12],
    )


def pool_budget(original: Any, configurator: Any, budget_bytes: int, **keywords: Any) -> Any:
    """Hook around ``KVCacheConfigurator.config_from_budget``: leave memory for document reuse.

    SGLang converts free bytes into pool sizes there, at the start and again after CUDA graphs are
    captured. Ends the process if no memory would be left for the pool.
    """
    options = document_options_of(configurator.server_args)
    if options is None:
        return original(configurator, budget_bytes, **keywords)
    config = configurator.model_config
    shape = served_shape(configurator.model, config.hf_config)
    tokens = options.max_prompt_tokens(config.context_len)
    reserved_bytes = options.pool_memory_bytes(str(configurator.device))
    working = reserved_memory(shape, configurator.model_dtype.itemsize, tokens, reserved_bytes)
    if working.total_bytes >= budget_bytes:
        raise SystemExit(
            f"sglang-canopy: --canopy-documents on needs {working} beside the KV pool, and only "
            f"{budget_bytes >> 20:,} MiB are free for both: lower prompt_tokens or the "
            "tiers' sizes, or raise --mem-fraction-static"
        )
    logger.info("canopy: document reuse leaves %s out of the KV pool", working)
    return original(configurator, budget_bytes - working.total_bytes, **keywords)


def _calibrate_and_check(engine: DocumentEngine, tokenizer: Any, tp_size: int) -> None:
    """Read the calibrated ratios, then run the quality check at every ratio in use.

    Raises CanopyError.
    """
    options, model, runner = engine.options, engine.model, engine.runner
    engine.setting = Setting(
        model.identity, _chip_name(model.device), str(model.dtype).removeprefix("torch."), tp_size,
        runner.attn_backend.canopy.name,
    )  # fmt: skip
    engine.ratios = calibrated_ratios(options.calibration, engine.setting)
    ratios = ratios_in_use(options, engine.ratios)
    check_quality(model, tokenizer, options.selector, ratios, options.min_kept)


def ratios_in_use(options: ReuseOptions, calibrated: Mapping[str, float]) -> set[float]:
    """Return every ratio that a request without its own may have (``DocumentEngine.ratio_for``)."""
    if options.ratio is not None:
        return {options.ratio}
    return {calibrated.get(tier, DEFAULT_RATIO) for tier in options.capacity_bytes()}


def _chip_name(device: torch.device) -> str:
    """Return the name that a calibration is saved under: the chip, on a CPU with its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu-{torch.get_num_threads()}"
