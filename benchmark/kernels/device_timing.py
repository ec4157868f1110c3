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

    def seconds(self, peak: dict) -> float:
        """Return the roofline time under measured ``flop_per_second`` and ``bytes_per_second``."""
        return max(self.flops / peak["flop_per_second"], self.bytes / peak["bytes_per_second"])


class Bench:
    """Timing on one device: medians, in seconds."""

    def __init__(self, smoke: bool) -> None:
        self.smoke = smoke
        self.device = "cpu" if smoke else "cuda"

    def time(self, work: Callable[[], object], repeats: int = 10) -> float:
        if self.smoke:
            begin = time.perf_counter()
            work()
            return time.perf_counter() - begin
        for _ in range(3):
            work()
        laps = []
        for _ in range(repeats):
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            work()
            b.record()
            torch.cuda.synchronize()
            laps.append(a.elapsed_time(b) / 1e3)
        return statistics.median(laps)

    def random(self, *size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*size, device=self.device, dtype=torch.float32).to(dtype)


def measure_peaks(b: Bench) -> dict:
    """Bytes/s of a large copy (read plus write) and FLOP/s of a large bf16 product."""
    n = 1 << (16 if b.smoke else 29)
    x = b.random(n)
    y = torch.empty_like(x)
    copy = b.time(lambda: y.copy_(x))
    del y, x
    m = 256 if b.smoke else 8192
    p, q = b.random(m, m), b.random(m, m)
    return {
        "bytes_per_second": 2 * n * 2 / copy,
        "flop_per_second": 2 * m**3 / b.time(lambda: p @ q),
    }


def table(length: int, dim: int, device: str) -> torch.Tensor:
    """cos and sin of every position."""
    steps = torch.arange(0, dim, 2, device=device) / dim
    angle = torch.arange(length, device=device)[:, None] * 10000.0**-steps
    return torch.cat([angle.cos(), angle.sin()], -1)


def compare_to_peak(name: str, seconds: float, minimum_cost: TaskWork, peak: dict) -> dict:
    """Return a measured time, also as a multiple of the roofline of its task's least work."""
    return {f"{name}_s": seconds, f"{name}_times_floor": seconds / minimum_cost.seconds(peak)}
