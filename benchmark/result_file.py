"""Result files of a run: KEY.json, and KEY.md with the same values as tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write(path: Path, report: Any) -> None:
    """Write ``report`` to ``path`` (KEY.json) and its tables beside it (KEY.md)."""
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    markdown = f"# {path.stem}\n\n{as_tables(report)}\n"
    path.with_suffix(".md").write_text(markdown, encoding="utf-8")


def as_tables(report: Any) -> str:
    """Return nested values as Markdown tables: one for all single values, then one for each list of rows."""
    values = dict(_flatten(report))
    row_lists = {k: v for k, v in values.items() if isinstance(v, list)}
    single_values = [{"key": k, "value": v} for k, v in values.items() if k not in row_lists]
    tables = [_table(single_values)] if single_values else []
    for key, rows in row_lists.items():
        tables.append((f"{key}\n\n" if key else "") + _table([dict(_flatten(row)) for row in rows]))
    return "\n\n".join(tables)


def _table(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, ["---"] * len(columns)]
    cells += [[_cell(row.get(column, "")) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _cell(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _flatten(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Return pairs of a comma-joined path of keys and a value that is no mapping."""
    if isinstance(value, Mapping):
        prefix = f"{name}, " if name else ""
        return [pair for k, v in value.items() for pair in _flatten(v, f"{prefix}{k}")]
    return [(name, value)]
