"""Plain-text tables: columns aligned, numbers to the right."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """``rows`` of cells under ``header``; a column of numbers is set flush right."""
    columns = list(zip(header, *rows))
    widths = [max(map(len, column)) for column in columns]
    right = [all(_numeric(cell) for cell in column[1:]) for column in columns]

    def line(cells: Sequence[str]) -> str:
        aligned = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right))
        return "  ".join(aligned).rstrip()

    return "\n".join([line(header), line(["-" * w for w in widths]), *map(line, rows)])


def short_number(value: float) -> str:
    """At most five digits: ``1234``, ``12.3k``, ``4.56M``."""
    if abs(value) < 9999.5:
        return f"{value:.0f}"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= 0.9995 * limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value / 1e3:.3g}k"


def bytes_text(count: float) -> str:
    """``512 MiB``, ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.3g} {unit}" if count < 100 else f"{count:.0f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def _numeric(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell[0] in "+-."
