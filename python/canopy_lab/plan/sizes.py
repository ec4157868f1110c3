"""Sizes of tiers: where a search begins, what lies between two of them, and their names."""

from __future__ import annotations

import math

from sglang_canopy.errors import CanopyError

STEPS_AN_OCTAVE = 8
"""How finely sizes are told apart: in steps of 6 to 12 %."""


def round_size(size: float) -> float:
    """The nearest size that is told apart: 8, 9, ... 16, 18, ... 32, 36, ... or any power of two
    times one of these."""
    if size <= 0:
        return 0.0
    step = 2.0 ** (math.floor(math.log2(size)) - int(math.log2(STEPS_AN_OCTAVE)))
    return round(size / step) * step


def sizes(most: float, levels: int, least: float = 0.0) -> tuple[float, ...]:
    """0, and up to ``levels`` sizes, each half of the next, up to ``most``; none below ``least``.

    ``most`` is rounded up. Raises ``CanopyError`` for no size at all.
    """
    if not (most > 0 and math.isfinite(most)) or levels < 1:
        raise CanopyError(f"sizes need a largest size above 0 and a level, got {most}, {levels}")
    top = round_size(most)
    if top < most * (1 - 1e-9):
        top = round_size(most * (1 + 1 / STEPS_AN_OCTAVE))
    ladder = [top / 2**k for k in range(levels)]
    return (0.0, *(s for s in reversed(ladder) if s >= min(least, top)))


def between(low: float, high: float, least: float = 0.0) -> float | None:
    """A size in the middle of two others; ``None`` where they are neighbours or nothing of at
    least ``least`` lies between."""
    if low > 0 and high / low > 4:
        middle = round_size(math.sqrt(low * high))
    else:
        middle = round_size((low + high) / 2)
    return middle if low < middle < high and middle >= least else None


def finer(given: tuple[float, ...], steps: int) -> tuple[float, ...]:
    """``given``, and equal steps from 0 to its largest."""
    return tuple(sorted({*given, *(given[-1] * k / steps for k in range(steps + 1))}))


def gib_text(gib: float) -> str:
    """``512 GiB``, ``1.5 TiB``, ``256 MiB``."""
    if 0 < gib < 1:
        return f"{gib * 1024:.3g} MiB"
    return f"{gib:.4g} GiB" if gib < 1024 else f"{gib / 1024:.4g} TiB"
