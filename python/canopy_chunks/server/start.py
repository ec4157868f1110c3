"""Start of document reuse in a scheduler: memory beside the pool, the engine, quality and ratios."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch

from canopy_chunks import options_of
from canopy_chunks.calibration.saved import Setting, calibrated_ratios
from canopy_chunks.fuse.working_memory import working_memory
from canopy_chunks.quality.start_check import Method, check_quality
from canopy_chunks.server import attention, kept
from canopy_chunks.server.engine import ChunkEngine
from canopy_chunks.server.model_view import check_layout, served_shape
from canopy_chunks.server.options import DEFAULT_RATIO, Options
from sglang_canopy.errors import CanopyError

logger = logging.getLogger(__name__)


def build(original: Any, scheduler: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Hook around ``Scheduler.__init__``: register attention backends, then build the engine."""
    options = options_of(server_args)
    if options is None:
        original(scheduler, server_args, *args, **kwargs)
        return
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
    engine.matched = functools.partial(kept.matched, scheduler.tree_cache)
    kept.announce_exact_only(scheduler.tree_cache)
    runner.canopy = engine
    logger.info(
        "canopy: documents are reused: selector %s, ratios %s, encoding %s, model %s",
        options.selector,
        sorted(ratios_in_use(options, engine.ratios)),
        "mixed" if engine.stand_ins else "prefix",
        engine.model.identity[:12],
    )


def pool_budget(original: Any, configurator: Any, budget_bytes: int, **more: Any) -> Any:
    """Hook around ``KVCacheConfigurator.config_from_budget``: leave memory for document reuse.

    SGLang converts free bytes into pool sizes there, at the start and again after CUDA graphs are
    captured. Ends the process if no memory would be left for the pool.
    """
    options = options_of(configurator.server_args)
    if options is None:
        return original(configurator, budget_bytes, **more)
    config = configurator.model_config
    shape = served_shape(configurator.model, config.hf_config)
    tokens = options.longest_prompt(config.context_len)
    beside = options.bytes_beside_pool(str(configurator.device))
    needed = working_memory(shape, configurator.model_dtype.itemsize, tokens, beside)
    if needed.total >= budget_bytes:
        raise SystemExit(
            f"sglang-canopy: --canopy-chunks on needs {needed} beside the KV pool, and only "
            f"{budget_bytes >> 20:,} MiB are free for both: lower prompt_tokens or the "
            "tiers' sizes, or raise --mem-fraction-static"
        )
    logger.info("canopy: document reuse leaves %s out of the KV pool", needed)
    return original(configurator, budget_bytes - needed.total, **more)


def _calibrate_and_check(engine: ChunkEngine, tokenizer: Any, tp_size: int) -> None:
    """Read the calibrated ratios, then run the quality check at every ratio in use.

    Raises CanopyError.
    """
    options, model, runner = engine.options, engine.model, engine.runner
    engine.setting = Setting(
        model.identity, _chip(model.device), str(model.dtype).removeprefix("torch."), tp_size,
        runner.attn_backend.canopy.name,
    )  # fmt: skip
    engine.ratios = calibrated_ratios(options.calibration, engine.setting)
    method = Method(options.selector, options.encode)
    check_quality(model, tokenizer, method, ratios_in_use(options, engine.ratios), options.min_kept)


def ratios_in_use(options: Options, calibrated: Mapping[str, float]) -> set[float]:
    """Return every ratio that a request without its own may have (``ChunkEngine.ratio_for``)."""
    if options.ratio is not None:
        return {options.ratio}
    return {calibrated.get(tier, DEFAULT_RATIO) for tier in options.capacity_bytes()}


def _chip(device: torch.device) -> str:
    """Return the name that a calibration is saved under: the chip, on a CPU with its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu-{torch.get_num_threads()}"
