"""Questions that ``run.py`` answers, and the paths of their result files."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class QuestionRun:
    """One run of a question: where its data are, and what it answers."""

    data_folder: Path
    """Folder with ``mooncake/``, ``agentic_coding/`` and ``rag/``."""

    group: str
    key: str

    def figure_path(self) -> Path:
        """Return the path of the question's figure; its folder exists."""
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
    """Content of the result, in one sentence."""

    answer: Callable[[QuestionRun], Any]
    """Returns the result, as JSON; deterministic but for times."""

    cpu_minutes: float = 1.0
    """Rough CPU time; ``run.py`` starts the longest first."""


PAPERS = ("wa", "tail", "cachetune", "kareto")


def result_path(group: str, key: str) -> Path:
    """Return the path of a question's result; KEY.md is beside it."""
    folder = f"papers/results/{group}" if group in PAPERS else f"{group}/results"
    return ROOT / "benchmark" / folder / f"{key}.json"


def find_data_folder(folder: Path | None = None) -> Path:
    """Return ``folder`` if it is set, else ``$CANOPY_DATA``, else ``../shared/data`` beside the project."""
    return folder or Path(os.environ.get("CANOPY_DATA", ROOT.parent / "shared" / "data"))
