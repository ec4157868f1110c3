"""Layout of the packages: the folders, and the imports that each may have.

`test/test_architecture.py` checks the code against this file, and `scripts/reference_docs.py` writes
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
    "canopy_documents": "Documents in any order: reuse of KV that is not a prefix.",
}
"""Each reads alone: a server without documents never imports the other two."""

OPEN_FILES = {
    *("bounded", "declared", "errors", "private_file", "ranks", "records", "releases", "tenant"),
    "__init__",
}
"""Top-level files of ``sglang_canopy``: they import only each other, and every folder may import them."""

SPLIT_FOLDERS = {"server", "live"}
"""Folders that consist of several. So is all of ``canopy_documents``."""

ALLOWED_IMPORTS: dict[str, set[str]] = {
    "policy": {"reuse"},
    "reuse": set(),
    "ttl": set(),
    "whatif": {"policy", "reuse"},
    "schedule": set(),
    "admission": {"reuse"},
    "wire": set(),
    "request": {"wire"},
    "config": {"admission", "policy", "request", "schedule", "ttl"},
    "disk": {"policy", "ttl"},
    "radix": {"admission", "config", "policy", "reuse", "ttl", "whatif", "wire"},
    "storage": {"disk", "policy", "radix", "ttl", "wire"},
    "telemetry": {"admission", "policy", "radix", "reuse", "ttl", "whatif", "wire"},
    "server": set(),
    "server/http": {
        *("admission", "config", "policy", "radix", "request"),
        *("reuse", "telemetry", "whatif", "wire"),
    },
    "server/scheduler": {
        *("admission", "config", "policy", "radix", "request", "reuse", "schedule"),
        *("storage", "telemetry", "whatif", "wire"),
    },
    "server/start": {
        *("admission", "config", "policy", "radix", "request", "storage"),
        *("server/http", "server/scheduler"),
    },
    "doctor": {"admission", "config", "policy", "server/start", "storage"},
    "canopy_documents": set(),
    "canopy_documents/text": {"canopy_documents", "wire"},
    "canopy_documents/store": {"canopy_documents", "canopy_documents/text", "disk", "policy"},
    "canopy_documents/fuse": {"canopy_documents/store", "canopy_documents/text"},
    "canopy_documents/quality": {
        "canopy_documents/fuse",
        "canopy_documents/store",
        "canopy_documents/text",
    },
    "canopy_documents/calibration": set(),
    "canopy_documents/plugin": {
        *("canopy_documents", "canopy_documents/server", "config", "request", "server/scheduler"),
        *("server/start", "telemetry", "wire"),
    },
    "canopy_documents/server": {
        *("canopy_documents", "canopy_documents/calibration", "canopy_documents/fuse"),
        *("canopy_documents/quality", "canopy_documents/store", "canopy_documents/text"),
        *("config", "disk", "request", "storage", "wire"),
    },
    "report": set(),
    "trace": set(),
    "latency": set(),
    "group_ttl": {"reuse", "sim", "trace", "ttl"},
    "sim": {"admission", "latency", "policy", "report", "reuse", "schedule", "trace", "ttl"},
    "characterize": {"policy", "report", "reuse", "sim", "trace"},
    "advise": {"admission", "characterize", "config", "policy", "report", "sim", "trace"},
    "plan": {"config", "group_ttl", "policy", "report", "sim", "trace", "ttl"},
    "live": set(),
    "live/replay": {"latency", "report", "server/start", "trace", "wire"},
    "live/profile": set(),
    "cli": {
        *("advise", "canopy_documents/calibration", "characterize", "config", "doctor", "latency"),
        *("live/profile", "plan", "policy", "report", "request"),
        *("group_ttl", "sim", "trace", "ttl", "wire"),
    },
    "bench_serving": {"live/replay"},
}
"""Folder -> the folders it may import. No two folders import each other. The HTTP process and the schedulers
exchange messages through ``wire`` and do not import each other."""

PLAIN_FOLDERS = (
    *("group_ttl", "policy", "reuse", "ttl", "disk", "trace", "sim", "characterize", "plan"),
    *("report", "advise", "admission", "config", "latency", "live/profile"),
    *("request", "schedule", "whatif", "wire"),
)
"""Folders that need neither torch nor sglang."""

SGLANG_FOLDERS = {
    *("radix", "ranks", "storage", "telemetry"),
    *("server/start", "server/http", "server/scheduler"),
    *("live/replay", "bench_serving", "canopy_documents/plugin", "canopy_documents/server"),
    *("request", "doctor", "wire"),
}
"""Folders that may import sglang; ``request`` and ``wire`` inside functions only."""


def source_files() -> Iterator[Path]:
    return iter(sorted(path for name in PACKAGES for path in (PYTHON / name).rglob("*.py")))


def folder_of(path: Path) -> str:
    """Return the folder that a file is in; the file's own name at the top of its package."""
    package, *parts = path.relative_to(PYTHON).parts
    if package == "canopy_documents":
        return package if len(parts) == 1 else f"{package}/{parts[0]}"
    if parts[0] in SPLIT_FOLDERS and len(parts) > 2:
        return "/".join(parts[:2])
    return parts[0].removesuffix(".py")


def path_of(folder: str) -> Path:
    """Return the path of a folder, or of the file that it is."""
    if folder.startswith("canopy_documents"):
        return PYTHON / folder
    paths = [PYTHON / package / folder for package in PACKAGES]
    return next((p for p in paths if p.is_dir()), PYTHON / "sglang_canopy" / f"{folder}.py")


def purpose_of(folder: str) -> str:
    """The first sentence of the folder's docstring."""
    path = path_of(folder)
    if path.is_dir():
        path /= "__init__.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def folder_list() -> str:
    """The folders as a Markdown list."""
    return "".join(f"- `{folder}`: {purpose_of(folder)}\n" for folder in ALLOWED_IMPORTS)
