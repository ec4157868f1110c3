"""How the package is laid out: its rooms, what each may import, and three journeys through it.

`test/test_architecture.py` holds the code against this file, and `scripts/reference_docs.py` makes
the tables of `docs/architecture.md` from it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "sglang_canopy"

OPEN = {"errors", "private_file", "records", "tenant", "__init__"}
"""Files at the top, which import nothing but each other and are open to every room."""

ROOMS: dict[str, set[str]] = {
    "policy": {"reuse"},
    "reuse": set(),
    "ttl": set(),
    "disk": {"policy", "ttl"},
    "config": {"policy", "ttl"},
    "request": set(),
    "trace": set(),
    "sim": {"policy", "reuse", "trace", "ttl"},
    "characterize": {"policy", "reuse", "sim", "trace"},
    "plan": {"config", "policy", "reuse", "sim", "trace", "ttl"},
    "report": {"characterize", "plan", "sim"},
    "radix": {"config", "policy", "request", "reuse", "ttl"},
    "storage": {"config", "disk", "policy", "radix", "request", "ttl"},
    "telemetry": {"policy", "radix", "ttl"},
    "chunk": {"models", "policy"},
    "chunk/server": {"chunk", "config", "request"},
    "bench": {"request", "trace"},
    "profiling": {"bench", "sim", "trace"},
    "cpu": set(),
    "models": set(),
    "server": {
        *("bench", "chunk", "chunk/server", "config", "cpu", "policy", "radix", "request"),
        *("reuse", "storage", "telemetry"),
    },
    "cli": {
        *("bench", "characterize", "chunk", "config", "models", "plan", "policy", "profiling"),
        *("report", "sim", "telemetry", "trace", "ttl"),
    },
    "bench_serving": {"bench"},
}
"""Room -> the rooms it may import. Directions only: no two rooms import each other."""

LABORATORY = (
    *("policy", "reuse", "ttl", "disk", "trace", "sim", "characterize", "plan", "report"),
    *("config", "request"),
)
"""Rooms that need neither torch nor sglang."""

SGLANG = {
    *("radix", "storage", "telemetry", "server", "cpu", "bench", "bench_serving", "chunk/server"),
    "request",
}
"""Rooms that may import sglang; ``request`` inside functions only."""


@dataclass(frozen=True, slots=True)
class Step:
    """One stop of a journey: a function or method, and what happens there."""

    module: str
    name: str
    what: str

    @property
    def path(self) -> Path:
        return PACKAGE / f"{self.module}.py"


@dataclass(frozen=True, slots=True)
class Journey:
    """A way through the package, file by file."""

    title: str
    steps: tuple[Step, ...]
    most_files: int


JOURNEYS: dict[str, Journey] = {}


def files() -> Iterator[Path]:
    return iter(sorted(PACKAGE.rglob("*.py")))


def room_of(path: Path) -> str:
    """The room that a file is in; the file's own name at the top of the package."""
    parts = path.relative_to(PACKAGE).parts
    if parts[:2] == ("chunk", "server"):
        return "chunk/server"
    return parts[0].removesuffix(".py")


def purpose(room: str) -> str:
    """The first sentence of the room's docstring."""
    path = PACKAGE / room / "__init__.py"
    if not path.exists():
        path = PACKAGE / f"{room}.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def line_of(step: Step) -> int | None:
    """The line where the step's function is defined; ``None`` where there is none."""
    if not step.path.exists():
        return None
    nodes: list[ast.AST] = [ast.parse(step.path.read_text(encoding="utf-8"))]
    found: ast.AST | None = None
    for part in step.name.split("."):
        found = next(
            (
                node
                for parent in nodes
                for node in ast.walk(parent)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                and node.name == part
            ),
            None,
        )
        if found is None:
            return None
        nodes = [found]
    return getattr(found, "lineno", None)


def rooms_table() -> str:
    """The rooms as a Markdown table."""
    lines = ["| room | what is in it | may import |", "| --- | --- | --- |"]
    for room, allowed in ROOMS.items():
        names = ", ".join(f"`{name}`" for name in sorted(allowed)) or "nothing"
        lines.append(f"| `{room}` | {purpose(room)} | {names} |")
    return "\n".join(lines) + "\n"


def journey(name: str) -> str:
    """One journey as a numbered list, with the lines of today."""
    lines = []
    for number, step in enumerate(JOURNEYS[name].steps, 1):
        lines.append(f"{number}. `{step.module}.py:{line_of(step)}` `{step.name}`: {step.what}")
    return "\n".join(lines) + "\n"
