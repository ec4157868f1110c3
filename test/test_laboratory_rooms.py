"""The laboratory's rooms: no file imports itself through others, and none grows too long."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import sglang_canopy

PACKAGE = Path(sglang_canopy.__file__).parent
ROOMS = ("bench", "characterize", "cli", "plan", "report", "sim", "trace")
FILES = {
    ".".join(("sglang_canopy", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in PACKAGE.rglob("*.py")
}
"""Every module of the package. The way out of a room and back into it counts as a circle too."""


def imports(module: str) -> set[str]:
    """Modules of the package that ``module`` imports, in functions and for type checks too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                found.add(inner if inner in FILES else node.module)
    return (found & FILES.keys()) - {module}


def reached(module: str) -> set[str]:
    seen: set[str] = set()
    stack = list(imports(module))
    while stack:
        at = stack.pop()
        if at not in seen:
            seen.add(at)
            stack += imports(at)
    return seen


@pytest.mark.parametrize("room", ROOMS)
def test_no_file_imports_itself_through_others(room: str) -> None:
    mine = [m for m in FILES if f"{m}.".startswith(f"sglang_canopy.{room}.")]
    assert mine
    assert [m for m in mine if m in reached(m)] == []


@pytest.mark.parametrize("room", ROOMS)
def test_files_stay_below_400_lines(room: str) -> None:
    long = {
        path.name: lines
        for path in (PACKAGE / room).rglob("*.py")
        if (lines := len(path.read_text().splitlines())) >= 400
    }
    assert long == {}
