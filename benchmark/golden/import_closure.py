"""The project's modules that a server can import, found by reading every import from its start.

Imports inside functions count. So do all modules of a package that takes one of its modules by a
name made at run time (``importlib.import_module(f"...")``), as the policies' registry does.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from code_size import lines_of, packages
from paths import ROOT

DOCUMENTS = re.compile(r"(sglang_canopy\.chunk|canopy_chunks)(\.|$)")
"""Modules of document reuse."""
LABORATORY = re.compile(
    r"(sglang_canopy\.(trace|sim|characterize|advise|plan|report|cli|profiling)"
    r"|canopy_lab)(\.|$)"
)


def modules() -> dict[str, Path]:
    """Every module of the project, by its dotted name."""
    found = {}
    for folder in packages().values():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def start() -> str:
    """The module that SGLang loads: the entry point ``sglang.srt.plugins``."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'"sglang\.srt\.plugins"\]\s*\n\w+ = "([\w.]+):', text)
    assert found, "pyproject.toml names no sglang.srt.plugins"
    return found.group(1)


def closure(documents: bool = False) -> set[str]:
    """Return module names, with or without document reuse."""
    known = modules()
    seen: set[str] = set()
    ahead = [start()]
    while ahead:
        name = ahead.pop()
        if name in seen or name not in known or (not documents and DOCUMENTS.match(name)):
            continue
        seen.add(name)
        ahead += imported(known[name])
        ahead += [f"{prefix}{m}" for prefix in taken_by_name(known[name]) for m in below(prefix)]
        if "." in name:
            ahead.append(name.rpartition(".")[0])
    return seen


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def taken_by_name(path: Path) -> list[str]:
    """Return the packages of calls like ``import_module(f"package.{name}")``."""
    return re.findall(r'import_module\(\s*f"([\w.]+\.)\{', path.read_text(encoding="utf-8"))


def below(prefix: str) -> list[str]:
    """Modules right below a package."""
    names = [name.removeprefix(prefix) for name in modules() if name.startswith(prefix)]
    return [name for name in names if "." not in name]


def lines(names: set[str]) -> int:
    known = modules()
    return lines_of(known[name] for name in names)
