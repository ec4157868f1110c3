"""A question: code that answers it, and its result files."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class RunContext:
    """Inputs of a run."""

    data: Path
    """Folder with ``mooncake/``, ``agentic_coding/`` and ``rag/``."""

    group: str
    key: str

    @property
    def path(self) -> Path:
        """Result file."""
        return result_path(self.group, self.key)

    def figure(self) -> Path:
        """Return the path of a picture; its folder exists."""
        folder = ROOT / "docs" / "figures"
        if self.group in PAPERS:
            folder /= "papers"
        folder.mkdir(parents=True, exist_ok=True)
        separator = "-" if self.group in PAPERS else "_"
        return folder / f"{self.group}{separator}{self.key}.png"


@dataclass(frozen=True)
class Question:
    """One figure, table or claim that a command regenerates."""

    key: str
    """As a paper numbers it: ``figure-5``, ``tables-1-3``."""

    shows: str
    """Content in one sentence."""

    run: Callable[[RunContext], Any]
    """Return the JSON data; deterministic but for times."""

    minutes: float = 1.0
    """CPU minutes, roughly: the longest are started first."""


PAPERS = ("wa", "tail", "cachetune", "kareto")


def result_path(group: str, key: str) -> Path:
    """Return the path of a question's result; KEY.md is beside it."""
    folder = ROOT / "benchmark"
    base = folder / "papers" / "results" / group if group in PAPERS else folder / group / "results"
    return base / f"{key}.json"


def data_folder(folder: Path | None = None) -> Path:
    """Return ``folder`` if it is set, else ``$CANOPY_DATA``, else ``../shared/data`` beside the project."""
    return folder or Path(os.environ.get("CANOPY_DATA", ROOT.parent / "shared" / "data"))
