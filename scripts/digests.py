"""Compare SGLang's functions with the recorded version that Canopy was written against.

``sglang_digests.json`` has a digest of every function, private ones included, that Canopy overrides,
hooks or relies on; ``sglang_digests.py`` writes it for a new pinned version. Digests cover the
syntax tree without docstrings, so comments, formatting and the Python version do not matter.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

TABLE_FILE = Path(__file__).with_name("sglang_digests.json")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SIGNATURE_DIGITS = 8


def read_table() -> dict[str, Any]:
    """Return file below the package ``sglang`` -> its functions' digests, and which are only hooked."""
    return json.loads(TABLE_FILE.read_text(encoding="utf-8"))


def make_entry(source: bytes, names: Iterable[str]) -> dict[str, Any]:
    """Return the table's entry for one file. Raises ``KeyError`` for an undefined name."""
    tree = ast.parse(source)
    digests = {name: digest_of(tree, name) for name in sorted(names)}
    for name, digest in digests.items():
        if digest is None:
            raise KeyError(name)
    return {"names": digests}


def digest_of(tree: ast.Module, name: str) -> str | None:
    """Return the digest of a function or ``Class.method``; ``None`` if it is not defined.

    The first ``SIGNATURE_DIGITS`` digits are of its parameters, or of a class's fields.
    """
    nodes: list[ast.AST] = [tree]
    for part in name.split("."):
        nodes = [node for scope in nodes for node in _find_definitions(scope, part)]
    if not nodes:
        return None
    return _short_digest([*map(_signature, nodes)]) + _short_digest([*map(_shape, nodes)])


def _short_digest(shape: Any) -> str:
    return hashlib.sha256(repr(shape).encode()).hexdigest()[:SIGNATURE_DIGITS]


def _signature(node: ast.AST) -> Any:
    if isinstance(node, ast.ClassDef):
        return [_shape(field) for field in node.body if isinstance(field, ast.AnnAssign)]
    return _shape(getattr(node, "args", None))


def _find_definitions(scope: ast.AST, name: str) -> Iterator[ast.AST]:
    """Yield definitions of ``name`` directly in ``scope``, or in its ``if`` and ``try`` blocks."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, _DEFINITIONS):
            if node.name == name:
                yield node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                yield node
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from _find_definitions(node, name)


def _shape(node: Any) -> Any:
    """Convert a syntax tree to nested lists that do not depend on the Python version."""
    if isinstance(node, list):
        return [_shape(element) for element in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if value not in (None, [])}
    fields.pop("kind", None)  # marks string literals with the prefix u
    if isinstance(node, _DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = node.body[1:]
    return [type(node).__name__, *((name, _shape(value)) for name, value in fields.items())]
