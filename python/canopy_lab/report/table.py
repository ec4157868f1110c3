"""Plain-text tables with aligned columns; numbers are right-aligned."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

_CONSOLE_WIDTH = 10_000
"""Width of the console for tables, so that they are never wrapped or truncated."""


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format ``rows`` of cells under ``header``, with columns of numbers right-aligned.

    Plain text, the same on a terminal and in a pipe.
    """
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for column in zip(*rows) if rows else ([] for _ in header):
        table.add_column(justify="right" if all(map(_is_numeric, column)) else "left", no_wrap=True)
    table.add_row(*map(Text, header))
    table.add_row(*(Rule(characters="-") for _ in header))
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(file=io.StringIO(), width=_CONSOLE_WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def short_number(value: float) -> str:
    """Format a number with at most five digits: ``1234``, ``12.3k``, ``4.56M``."""
    if abs(value) < 9999.5:
        return f"{value:.0f}"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= 0.9995 * limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value / 1e3:.3g}k"


def _is_numeric(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell[0] in "+-."
