"""Timing on a device, its measured ceilings, and times against the floors that these set."""

# ruff: noqa: F821 - every closure here runs before its variables are deleted
from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from canopy_kernel.floors import Cost


class Bench:
    """Timing on one device: medians, in seconds."""

    def __init__(self, smoke: bool) -> None:
        self.smoke = smoke
        self.device = "cpu" if smoke else "cuda"

    @property
    def capability(self) -> int:
        """80, 90, ...; 0 without a CUDA device."""
        if not torch.cuda.is_available():
            return 0
        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor

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


def ceilings(b: Bench) -> dict:
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


def against_peaks(name: str, seconds: float, does: Cost, floor: Cost, top: dict) -> dict:
    """Return a measured time against arithmetic.

    does: operations and bytes of the kernel; floor: the least of the task; top: measured
    ``flop_per_second`` and ``bytes_per_second``. ``times_floor``: the time over the roofline of
    the floor; ``of_peak_flops``: the kernel's own rate of FLOPs over the measured one;
    ``of_peak_bytes``: the floor's bytes over the measured bandwidth (keys that tiles share are
    read from the cache, so a kernel's bytes may exceed it).
    """
    least = floor.seconds(top["flop_per_second"], top["bytes_per_second"])
    return {
        f"{name}_s": seconds,
        f"{name}_times_floor": seconds / least,
        f"{name}_of_peak_flops": does.flops / seconds / top["flop_per_second"],
        f"{name}_of_peak_bytes": floor.bytes / seconds / top["bytes_per_second"],
        f"{name}_flops_over_floor": does.flops / floor.flops,
    }
