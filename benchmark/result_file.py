"""Result files of a run: KEY.json, and KEY.md with the same values as tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write(path: Path, result: Any) -> None:
    """Write ``result`` to ``path`` (KEY.json) and its tables beside it (KEY.md)."""
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    markdown = f"# {path.stem}\n\n{as_tables(result)}\n"
    path.with_suffix(".md").write_text(markdown, encoding="utf-8")


def as_tables(result: Any) -> str:
    """Return nested results as Markdown tables, one for each list of rows and one for all other values."""
    values = dict(_flatten(result))
    lists = {k: v for k, v in values.items() if isinstance(v, list)}
    single_values = [{"key": k, "value": v} for k, v in values.items() if k not in lists]
    parts = [_table(single_values)] if single_values else []
    for key, rows in lists.items():
        parts.append((f"{key}\n\n" if key else "") + _table([dict(_flatten(row)) for row in rows]))
    return "\n\n".join(parts)


def _table(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, ["---"] * len(columns)]
    cells += [[_cell(row.get(column, "")) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _cell(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _flatten(value: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [
            p for k, v in value.items() for p in _flatten(v, f"{name}, {k}" if name else str(k))
        ]
    return [(name, value)]
