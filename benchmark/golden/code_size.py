"""Lines and functions of the packages, and words of the documents, from their text alone."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paths import ROOT, SOURCES


def packages() -> dict[str, Path]:
    """Every package of the checkout, by its name."""
    found = {}
    for folder in SOURCES:
        found |= {init.parent.name: init.parent for init in sorted(folder.glob("*/__init__.py"))}
    return found


def lines_of(paths: Iterator[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def lines_by_package() -> dict[str, int]:
    return {name: lines_of(folder.rglob("*.py")) for name, folder in packages().items()}


def lines_by_room() -> dict[str, int]:
    """A room is a folder right below a package; other files are ``(top)``."""
    rooms: dict[str, int] = {}
    for name, folder in packages().items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).parts
            room = f"{name}/{parts[0] if len(parts) > 1 else '(top)'}"
            rooms[room] = rooms.get(room, 0) + lines_of(iter([path]))
    return dict(sorted(rooms.items()))


def other_lines() -> dict[str, int]:
    """Return the lines of Python outside the packages."""
    folders = ("test", "benchmark", "scripts", "examples")
    golden = Path(__file__).parent
    return {
        name: lines_of(p for p in (ROOT / name).rglob("*.py") if golden not in p.parents)
        for name in folders
    }


def functions() -> dict[str, Any]:
    """Lengths in lines, from ``def`` to the last line; nested functions also count separately."""
    found = []
    for name, folder in packages().items():
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    length = (node.end_lineno or node.lineno) - node.lineno + 1
                    where = f"{name}/{path.relative_to(folder)} {node.name}"
                    found.append((length, where))
    found.sort()
    lengths = [length for length, _ in found]
    return {
        "count": len(lengths),
        "median_lines": int(statistics.median_low(lengths)),
        "p95_lines": lengths[int(len(lengths) * 0.95)],
        "largest_lines": lengths[-1],
        "largest": found[-1][1],
    }


def words() -> dict[str, int]:
    """Return the words of ``docs/`` and of the top-level pages."""
    pages = {"docs": (ROOT / "docs").rglob("*.md"), **{p.name: [p] for p in ROOT.glob("*.md")}}
    return {
        name: sum(len(page.read_text(encoding="utf-8").split()) for page in found)
        for name, found in pages.items()
    }
