"""Measuring what the ratio search needs: the cost profile of a tier, and TTFT at a ratio."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from canopy_chunks import disk, engine
from canopy_chunks.cache import dense_cache
from canopy_chunks.chunk import FusedPrompt, Placed
from canopy_chunks.fusion import fused_prefill
from canopy_chunks.model import Model
from canopy_chunks.placement import place_chunks
from canopy_chunks.ratio import Calibration, CostProfile, Search, Setting, golden_section
from canopy_chunks.selectors import make_selector
from sglang_canopy.errors import CanopyError


def on_tier(prompt: FusedPrompt, tier: str, directory: Path) -> FusedPrompt:
    """The same prompt with its chunks in ``memory`` or on ``disk``.

    A file just written may still be in the page cache: a disk that is really slow shows only with
    more chunks than memory.
    """
    if tier == "memory":
        return prompt
    if tier != "disk":
        raise CanopyError(f"tier {tier!r}: allowed are memory, disk")
    placed = []
    for i, p in enumerate(prompt.placed):
        path = directory / f"calibrate-{i}.chunk"
        disk.write(path, p.chunk)
        placed.append(Placed(disk.open_chunk(path), p.start))  # type: ignore[arg-type]
    return replace(prompt, placed=tuple(placed))


def profile(
    model: Model, prompt: FusedPrompt, selector: str = "default", repeats: int = 3
) -> CostProfile:
    """Medians of ``repeats``: t_c from a full prefill, t_i from placing every chunk's KV, t_o from a
    fused prefill that recomputes next to nothing, without its placing."""
    cache, choose = dense_cache(model, len(prompt)), make_selector(selector)
    least = 1.0 / max(2, prompt.reusable)
    compute, transfer, other = [], [], []
    for _ in range(repeats):
        start = time.perf_counter()
        engine.prefill(model, prompt.ids, cache)
        middle = time.perf_counter()
        place_chunks(model, prompt.placed, cache, prompt.in_chunk())
        compute.append((middle - start) / len(prompt))
        transfer.append((time.perf_counter() - middle) / max(1, prompt.reusable))
        timing = fused_prefill(model, prompt, cache, choose, least).timing
        other.append(timing.select + timing.recompute)
    return CostProfile(*(statistics.median(times) for times in (compute, transfer, other)))


def measure_ttft(
    model: Model, prompts: Sequence[FusedPrompt], selector: str, ratio: float, repeats: int = 3
) -> float:
    """Mean over prompts of the median TTFT in seconds, selection and placing included."""
    choose, total = make_selector(selector), 0.0
    for prompt in prompts:
        cache = dense_cache(model, len(prompt))
        times = [
            fused_prefill(model, prompt, cache, choose, ratio).timing.total for _ in range(repeats)
        ]
        total += statistics.median(times)
    return total / len(prompts)


def calibrate(
    model: Model,
    prompts: Sequence[FusedPrompt],
    r_min: float,
    r_max: float = 1.0,
    selector: str = "default",
    tolerance: float = 0.05,
) -> tuple[Calibration, Search]:
    """Algorithm 1 on these prompts: profile, prior, golden-section search on measured TTFT."""
    found = profile(model, prompts[0], selector)
    start = found.prior(r_min, r_max)
    search = golden_section(
        lambda r: measure_ttft(model, prompts, selector, r), start, r_min, r_max, tolerance
    )
    return Calibration(search.ratio, r_min, found), search


def setting_of(model: Model, identity: str, tp_size: int = 1, backend: str = "") -> Setting:
    """What a calibration of a loaded model is saved under; ``identity``: that of its directory;
    backend: a server's attention backend."""
    dtype = str(model.dtype).removeprefix("torch.")
    return Setting(identity, device_name(model), dtype, tp_size, backend)


def device_name(model: Model) -> str:
    """What a calibration is saved under: the chip, and on a CPU the threads too."""
    if model.device.type == "cuda":
        return torch.cuda.get_device_name(model.device)
    return f"cpu-{torch.get_num_threads()}"
