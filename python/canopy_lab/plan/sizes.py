"""Sizes of tiers: initial sizes, midpoints, and their names."""

from __future__ import annotations

import math

from sglang_canopy.errors import CanopyError

STEPS_PER_OCTAVE = 8
"""Resolution of sizes: steps of 6 to 12 %."""


def round_size(size: float) -> float:
    """Round to the resolution: 8, 9, ... 16, 18, ... 32, 36, ..., times any power of two."""
    if size <= 0:
        return 0.0
    step = 2.0 ** (math.floor(math.log2(size)) - int(math.log2(STEPS_PER_OCTAVE)))
    return round(size / step) * step


def halved_sizes(largest: float, levels: int, min_size: float = 0.0) -> tuple[float, ...]:
    """Return 0 and up to ``levels`` sizes from ``largest`` down, each half of the previous one.

    Sizes below ``min_size`` are omitted. ``largest`` is rounded up. Raises ``CanopyError`` if there is no
    size.
    """
    if not (largest > 0 and math.isfinite(largest)) or levels < 1:
        raise CanopyError(
            f"sizes need a maximum above 0 and at least one level, got {largest}, {levels}"
        )
    rounded = round_size(largest)
    if rounded < largest * (1 - 1e-9):
        rounded = round_size(largest * (1 + 1 / STEPS_PER_OCTAVE))
    halved = [rounded / 2**k for k in range(levels)]
    return (0.0, *(size for size in reversed(halved) if size >= min(min_size, rounded)))


def middle_size(low: float, high: float, min_size: float = 0.0) -> float | None:
    """Return a size midway between two; ``None`` without one, or if below ``min_size``."""
    if low > 0 and high / low > 4:
        middle = round_size(math.sqrt(low * high))
    else:
        middle = round_size((low + high) / 2)
    return middle if low < middle < high and middle >= min_size else None


def add_steps(sizes: tuple[float, ...], steps: int) -> tuple[float, ...]:
    """Return ``sizes``, and equal steps from 0 to its largest."""
    return tuple(sorted({*sizes, *(sizes[-1] * k / steps for k in range(steps + 1))}))


def format_gib(gib: float) -> str:
    """Format a size: ``512 GiB``, ``1.5 TiB``, ``256 MiB``."""
    if 0 < gib < 1:
        return f"{gib * 1024:.3g} MiB"
    return f"{gib:.4g} GiB" if gib < 1024 else f"{gib / 1024:.4g} TiB"
