"""Shares, times, sizes and counts as text."""

from __future__ import annotations


def percent(value: float, digits: int = 0) -> str:
    return f"{100.0 * value:.{digits}f} %"


def seconds(value: float) -> str:
    """Format a time: ``85 ms``, ``1.23 s``, ``12 min``, ``3.4 h``, ``2.1 days``."""
    if value < 0.0005:
        return "0 s"
    for limit, unit, factor in ((0.9995, "ms", 1e-3), (120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):  # fmt: skip
        if value < limit:
            return f"{value / factor:.3g} {unit}"
    return f"{value / 86_400:.3g} days"


def bytes_text(value: float) -> str:
    """Format bytes: ``512 MiB``, ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def count_text(value: float) -> str:
    """Format a number with thousands separators."""
    return f"{value:,.0f}"
