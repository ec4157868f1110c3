"""Timing on a device, its measured peaks, and times against the floors that these set."""

# ruff: noqa: F821 - every closure here runs before its variables are deleted
from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TaskWork:
    """FLOPs and bytes of a task: each visible pair of query and key once, each byte once."""

    flops: float
    bytes: float

    def roofline_s(self, peak: dict) -> float:
        """Return the roofline time under measured ``flop_per_second`` and ``bytes_per_second``."""
        return max(self.flops / peak["flop_per_second"], self.bytes / peak["bytes_per_second"])


class Bench:
    """Timing on one device: medians, in seconds."""

    def __init__(self, is_smoke: bool) -> None:
        self.is_smoke = is_smoke
        self.device = "cpu" if is_smoke else "cuda"

    def median_s(self, work: Callable[[], object], repeats: int = 10) -> float:
        if self.is_smoke:
            start_s = time.perf_counter()
            work()
            return time.perf_counter() - start_s
        for _ in range(3):
            work()
        times_s = []
        for _ in range(repeats):
            start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start_event.record()
            work()
            end_event.record()
            torch.cuda.synchronize()
            times_s.append(start_event.elapsed_time(end_event) / 1e3)
        return statistics.median(times_s)

    def random(self, *size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*size, device=self.device, dtype=torch.float32).to(dtype)


def measure_peaks(bench: Bench) -> dict:
    """Bytes/s of a large copy (read plus write) and FLOP/s of a large bf16 product."""
    numbers = 1 << (16 if bench.is_smoke else 29)
    source = bench.random(numbers)
    target = torch.empty_like(source)
    copy_s = bench.median_s(lambda: target.copy_(source))
    del target, source
    side = 256 if bench.is_smoke else 8192
    left, right = bench.random(side, side), bench.random(side, side)
    product_s = bench.median_s(lambda: left @ right)
    return {"bytes_per_second": 4 * numbers / copy_s, "flop_per_second": 2 * side**3 / product_s}


def cos_sin_table(length: int, dim: int, device: str) -> torch.Tensor:
    """Return cos and sin of every position below ``length``."""
    steps = torch.arange(0, dim, 2, device=device) / dim
    angle = torch.arange(length, device=device)[:, None] * 10000.0**-steps
    return torch.cat([angle.cos(), angle.sin()], -1)


def compare_to_peak(name: str, seconds: float, minimum_cost: TaskWork, peak: dict) -> dict:
    """Return a measured time, also as a multiple of the roofline of its task's least work."""
    return {f"{name}_s": seconds, f"{name}_times_floor": seconds / minimum_cost.roofline_s(peak)}
