"""How the packages are laid out: their rooms, and what each may import.

`test/test_architecture.py` holds the code against this file, and `scripts/reference_docs.py` makes
the table of `docs/architecture.md` from it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / "python"

PACKAGES: dict[str, str] = {
    "sglang_canopy": "What runs inside a server, and the policies that the laboratory shares with it.",
    "canopy_lab": "Traces, simulators, advice, plans and the command line: neither torch nor sglang.",
    "canopy_chunks": "Documents in any order: reuse of KV that is not a prefix.",
}
"""Each reads alone: a server without documents never imports the other two."""

OPEN = {"declared", "errors", "private_file", "records", "tenant", "thread_time", "__init__"}
"""Files at the top of ``sglang_canopy``, which import nothing but each other and are open to every room."""

ROOMS: dict[str, set[str]] = {
    "policy": {"reuse"},
    "reuse": set(),
    "ttl": set(),
    "whatif": {"policy", "reuse"},
    "schedule": set(),
    "admission": {"reuse"},
    "disk": {"policy", "ttl"},
    "config": {"admission", "policy", "request", "schedule", "ttl"},
    "request": set(),
    "clients": set(),
    "trace": set(),
    "latency": set(),
    "sim": {"admission", "latency", "policy", "reuse", "schedule", "trace", "ttl"},
    "characterize": {"policy", "reuse", "sim", "trace"},
    "advise": {"characterize", "config", "policy", "sim", "trace"},
    "plan": {"config", "policy", "sim", "trace", "ttl"},
    "report": {"advise", "characterize", "plan", "sim"},
    "top": {"policy"},
    "trial": {"top"},
    "radix": {"admission", "config", "policy", "request", "reuse", "ttl", "whatif"},
    "storage": {"disk", "policy", "radix", "request", "ttl"},
    "telemetry": {"admission", "policy", "radix", "reuse", "ttl", "whatif"},
    "ui": set(),
    "canopy_chunks": {"policy", "request"},
    "canopy_chunks/server": {"canopy_chunks", "config", "request"},
    "bench": {"latency", "request", "trace"},
    "profiling": set(),
    "server": {
        *(
            "admission",
            "canopy_chunks/server",
            "config",
            "policy",
            "radix",
            "request",
        ),
        *("reuse", "schedule", "storage", "telemetry", "ui", "whatif"),
    },
    "doctor": {"admission", "config", "policy", "server", "storage"},
    "cli": {
        *(
            "advise",
            "characterize",
            "canopy_chunks",
            "config",
            "doctor",
            "latency",
            "plan",
        ),
        *("policy", "profiling", "report", "request", "sim", "top", "trace", "trial", "ttl"),
    },
    "bench_serving": {"bench"},
}
"""Room -> the rooms it may import. Directions only: no two rooms import each other."""

LABORATORY = (
    *("policy", "reuse", "ttl", "disk", "trace", "sim", "characterize", "plan", "report"),
    *(
        "advise",
        "admission",
        "clients",
        "config",
        "latency",
        "request",
        "schedule",
        "top",
        "whatif",
    ),
)
"""Rooms that need neither torch nor sglang."""

SGLANG = {
    *(
        "radix",
        "storage",
        "telemetry",
        "server",
        "bench",
        "bench_serving",
        "canopy_chunks/server",
    ),
    *("request", "doctor"),
}
"""Rooms that may import sglang; ``request`` inside functions only."""


def files() -> Iterator[Path]:
    return iter(sorted(path for name in PACKAGES for path in (PYTHON / name).rglob("*.py")))


def room_of(path: Path) -> str:
    """The room that a file is in; the file's own name at the top of its package."""
    package, *parts = path.relative_to(PYTHON).parts
    if package == "canopy_chunks":
        return f"{package}/server" if parts[0] == "server" else package
    return parts[0].removesuffix(".py")


def folder_of(room: str) -> Path:
    """The folder of a room, or the file that it is."""
    if room.startswith("canopy_chunks"):
        return PYTHON / room
    places = [PYTHON / package / room for package in PACKAGES]
    return next(
        (place for place in places if place.is_dir()), PYTHON / "sglang_canopy" / f"{room}.py"
    )


def purpose(room: str) -> str:
    """The first sentence of the room's docstring."""
    path = folder_of(room)
    if path.is_dir():
        path /= "__init__.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def rooms_table() -> str:
    """The rooms as a Markdown table."""
    lines = ["| room | what is in it |", "| --- | --- |"]
    lines += [f"| `{room}` | {purpose(room)} |" for room in ROOMS]
    return "\n".join(lines) + "\n"
