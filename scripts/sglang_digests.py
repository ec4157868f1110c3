"""Write the digests of SGLang's functions that Canopy builds on. Run it when the pin moves.

    python scripts/sglang_digests.py            # writes scripts/sglang_digests.json
    python scripts/sglang_digests.py --check    # exit status 1 and names if it is out of date

The table has every method that a class of ours overrides, every function that we hook or
import, and every private method that we call (found in our own source), apart from SGLang's documented
extension points. Before writing it for a new SGLang, read what changed (``follow_sglang.py``). No server reads it.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import sglang

import canopy_cpu as cpu
import canopy_documents
import canopy_lab
import digests
import sglang_canopy
from canopy_documents.plugin import entry as document_plugin
from canopy_documents.plugin import hooks as documents
from canopy_lab.live.replay import forced_output, server_plugin
from sglang_canopy.server.start import hooks

ROOT = Path(sglang.__path__[0])
OUR_PACKAGES = (sglang_canopy, canopy_lab, canopy_documents, cpu)
OUR_FOLDERS = [Path(package.__path__[0]) for package in OUR_PACKAGES]
EXTENSION_POINTS = re.compile(
    r"HiCacheStorage(\..*|Config|ExtraInfo)?|register_\w+|registered_\w+|\w+Registry\.\w+"
)
"""Functions that SGLang offers to plugins: a change of their bodies is SGLang's business."""


class Place(NamedTuple):
    """A file below the package ``sglang``, and a name in it."""

    file: str
    name: str


def our_files() -> list[tuple[Path, str]]:
    """Return every Python file of ours, and its module."""
    modules = []
    for folder in OUR_FOLDERS:
        for path in sorted(folder.rglob("*.py")):
            name = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
            modules.append((path, name.removesuffix(".__init__")))
    return sorted(modules)


def our_modules() -> list[Any]:
    """Return every module of ours that imports SGLang."""
    names = (name for path, name in our_files() if any(_imports(_tree(path))))
    return [*map(importlib.import_module, names)]


def classes_on_sglang() -> list[type]:
    """Return our classes with a base class of SGLang."""
    return [
        value
        for module in our_modules()
        for value in vars(module).values()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and any(_is_sglangs(base) for base in value.__mro__)
    ]


def overridden_functions() -> Iterator[Any]:
    """Yield SGLang's version of each method that a class of ours overrides."""
    for our_class in classes_on_sglang():
        for name in vars(our_class):
            for base in our_class.__mro__[1:]:
                if _is_sglangs(base) and name in vars(base):
                    yield vars(base)[name]
                    break


def private_functions() -> Iterator[Any]:
    """Yield the private methods that our source names, of SGLang's classes with classes of ours below."""
    bases = {base for cls in classes_on_sglang() for base in cls.__mro__ if _is_sglangs(base)}
    for path, _ in our_files():  # also where SGLang's objects come as arguments
        names = {node.attr for node in ast.walk(_tree(path)) if isinstance(node, ast.Attribute)}
        for base in bases:
            for name in vars(base).keys() & names:
                if name.startswith("_") and not name.startswith("__"):
                    yield vars(base)[name]


def imported_functions() -> Iterator[Any]:
    """Yield SGLang's functions and dataclasses that our source imports."""
    for module in our_modules():
        for source, name in _imports(_tree(Path(module.__file__))):
            value = getattr(importlib.import_module(source), name, None)
            if inspect.isfunction(value) or dataclasses.is_dataclass(value):
                yield value


def hook_functions() -> Iterator[Any]:
    """Yield SGLang's functions in our tables of hooks."""
    addon_hooks = (*document_plugin.ADDON.flag_hooks, *server_plugin.ADDON.flag_hooks)
    all_hooks = (*hooks.HOOKS, *addon_hooks, *documents.HOOKS, *forced_output.HOOKS)
    for target in (*(hook.target for hook in all_hooks), *cpu.CHECKED_FUNCTIONS):
        owner, name = target.rsplit(".", 1)
        yield inspect.getattr_static(pkgutil.resolve_name(owner), name)


def place_of(value: Any) -> Place | None:
    """Return the place where SGLang defines a function, method, property or class, else ``None``."""
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        return None
    value = inspect.unwrap(value)
    if not value.__module__.startswith("sglang.") or "<" in value.__qualname__:
        return None
    file = Path(inspect.getsourcefile(value) or "")
    return Place(file.relative_to(ROOT).as_posix(), value.__qualname__)


def make_table() -> dict[str, Any]:
    """Return the table of the installed SGLang."""
    used = [*overridden_functions(), *private_functions(), *imported_functions()]
    names: dict[str, set[str]] = defaultdict(set)
    for value in (*used, *hook_functions()):
        place = place_of(value)
        if place is not None and not _is_offered(value, place.name):
            names[place.file].add(place.name)
    hooked = {*map(place_of, hook_functions())}.difference(map(place_of, used))
    return {
        file: {
            **digests.make_entry((ROOT / file).read_bytes(), names[file]),
            "hooked": sorted(name for name in names[file] if (file, name) in hooked),
        }
        for file in sorted(names)
    }


def _is_offered(value: Any, name: str) -> bool:
    """Return whether SGLang offers a function to plugins, by name or in its docstring."""
    is_stated = "extension point" in (inspect.getdoc(value) or "").lower()
    return is_stated or EXTENSION_POINTS.fullmatch(name) is not None


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield module and name of each import from SGLang, except for annotations, which build on nothing."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
        for alias in node.names:
            yield node.module or "", alias.name
    for child in ast.iter_child_nodes(node):
        yield from _imports(child)


def _is_sglangs(base: type) -> bool:
    return base.__module__.split(".")[0] == "sglang"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    arguments = parser.parse_args()
    table = make_table()
    text = json.dumps(table, indent=1) + "\n"
    if not arguments.check:
        digests.TABLE_FILE.write_text(text, encoding="utf-8")
        print(f"{digests.TABLE_FILE}: {sum(len(e['names']) for e in table.values())} functions")
        return 0
    recorded = digests.read_table()
    files = recorded.keys() | table
    stale_files = sorted(file for file in files if recorded.get(file) != table.get(file))
    for file in stale_files:
        print(f"{file}: the table is out of date; run python scripts/sglang_digests.py")
    return 1 if stale_files else 0


if __name__ == "__main__":
    sys.exit(main())
