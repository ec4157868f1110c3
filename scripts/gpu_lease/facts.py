"""Measured limits of the chip: copies, products, pinned memory over the bus, one eager operation."""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable, Sequence

import torch
import triton
from result import result


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    return argparse.ArgumentParser(description=__doc__).parse_args(words)


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the seconds of one ``work`` after a warm-up."""
    work()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / repeats


def copy_gb_s() -> float:
    x = torch.randn(1 << 29, device="cuda").bfloat16()
    y = torch.empty_like(x)
    return 2 * x.nbytes / seconds(lambda: y.copy_(x)) / 1e9


def product_tflop_s() -> float:
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    return 2 * 8192**3 / seconds(lambda: a @ a) / 1e12


def pinned_gb_s() -> float:
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    return host.nbytes / seconds(lambda: there.copy_(host, non_blocking=True)) / 1e9


def operation_us() -> float:
    """Time of the host for one small operation."""
    x = torch.zeros(8, device="cuda")
    begin = time.perf_counter()
    for _ in range(2000):
        x.add_(1)
    return (time.perf_counter() - begin) / 2000 * 1e6


def main() -> None:
    arguments()
    chip = torch.cuda.get_device_properties(0)
    result(
        "facts",
        device=chip.name,
        multiprocessors=chip.multi_processor_count,
        torch=torch.__version__,
        triton=triton.__version__,
        nvcc=shutil.which("nvcc"),
        copy_gb_s=round(copy_gb_s()),
        product_tflop_s=round(product_tflop_s()),
        pinned_gb_s=round(pinned_gb_s(), 1),
        operation_us=round(operation_us(), 2),
    )


if __name__ == "__main__":
    main()
