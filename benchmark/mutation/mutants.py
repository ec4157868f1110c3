"""Every single change of a file's syntax tree that its tests ought to notice."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SWAPS: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
STATEMENTS = (ast.AugAssign, ast.Delete, ast.Break, ast.Continue)
LOGGERS = ("logger", "warnings")

Change = Callable[[ast.AST], None]


@dataclass(frozen=True)
class Mutant:
    """One change: of the ``number``-th node that ``ast.walk`` yields."""

    path: Path
    module: str
    text: str
    """File, line, and the code before and after."""
    source: str
    number: int
    change: Change

    def tree(self) -> ast.Module:
        """Return the changed file."""
        tree = ast.parse(self.source)
        self.change(list(ast.walk(tree))[self.number])
        return ast.fix_missing_locations(tree)


def mutants(path: Path, module: str, root: Path) -> Iterator[Mutant]:
    """Yield the mutants of ``path``. Annotations, messages, logs, asserts and constants at the top of
    a file stay as they are."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    kept = {id(node) for part in _kept(tree) for node in ast.walk(part)}
    for number, node in enumerate(ast.walk(tree)):
        if id(node) in kept:
            continue
        for change in _changes(node, kept):
            before, after = copy.deepcopy(node), copy.deepcopy(node)
            change(after)
            text = f"{path.relative_to(root)}:{_line(node)}: {_shown(before, after)}"
            yield Mutant(path, module, text, source, number, change)


def _kept(tree: ast.Module) -> Iterator[ast.AST]:
    yield from (node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from node.decorator_list
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns:
            yield node.returns
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            yield node.annotation
        if isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
            yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield node
        if isinstance(node, ast.Expr) and ast.unparse(node).startswith(LOGGERS):
            yield node


def _changes(node: ast.AST, kept: set[int]) -> Iterator[Change]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        yield lambda n: n.ops.__setitem__(0, SWAPS[type(n.ops[0])]())  # type: ignore[attr-defined]
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPS:
        yield lambda n: setattr(n, "op", SWAPS[type(n.op)]())  # type: ignore[attr-defined]
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))  # type: ignore[attr-defined]
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield lambda n: setattr(n, "value", not n.value)  # type: ignore[attr-defined]
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield lambda n: setattr(n, "value", n.value + 1)  # type: ignore[attr-defined]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
        yield lambda n: setattr(n.func, "id", CALLS[n.func.id])  # type: ignore[attr-defined]
    for field in ("body", "orelse", "finalbody"):
        body = getattr(node, field, None)
        for at, statement in enumerate(body if isinstance(body, list) else ()):
            if id(statement) not in kept and _acts(statement):
                yield _without(field, at)


def _acts(statement: ast.stmt) -> bool:
    """Return whether removing a statement leaves no undefined name."""
    if isinstance(statement, ast.Assign):
        return all(isinstance(t, ast.Attribute | ast.Subscript) for t in statement.targets)
    is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    return is_call or isinstance(statement, STATEMENTS)


def _without(field: str, at: int) -> Change:
    def change(node: ast.AST) -> None:
        getattr(node, field)[at] = ast.copy_location(ast.Pass(), getattr(node, field)[at])

    return change


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


def _shown(before: ast.AST, after: ast.AST) -> str:
    """The first line that differs, before and after."""
    old, new = ast.unparse(before).splitlines(), ast.unparse(after).splitlines()
    for one, other in zip(old, new):
        if one != other:
            return f"`{one.strip()}` -> `{other.strip()}`"
    return f"`{old[-1].strip()}` left out"
