"""Shares, times, sizes and counts as text."""

from __future__ import annotations


def percent(value: float, digits: int = 0) -> str:
    return f"{100.0 * value:.{digits}f} %"


def seconds(value: float) -> str:
    """Format a time: ``85 ms``, ``12 min``."""
    if value < 0.0005:
        return "0 s"
    if value < 1.0:
        return f"{1000.0 * value:.0f} ms"
    if value < 10.0:
        return f"{value:.1f} s"
    if value < 120.0:
        return f"{value:.0f} s"
    if value < 7200.0:
        return f"{value / 60.0:.0f} min"
    return f"{value / 3600.0:.1f} h"


def size(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024.0:
            return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1024.0
    return f"{value:.1f} TiB"


def count(value: float) -> str:
    """Format a number with thousands separators."""
    return f"{value:,.0f}"
