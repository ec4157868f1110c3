"""An artefact: code that regenerates a figure or table of a paper, and its result files."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
"""`RESULTS/<paper>/<key>.json`, committed; the tables in docs/research/papers come from it."""

FIGURES = ROOT / "docs" / "figures" / "papers"


@dataclass(frozen=True)
class Context:
    """Inputs of an artefact: the data folder and the path of its picture."""

    data: Path
    """Folder with `mooncake/`, `agentic_coding/` and `rag/`."""

    paper: str
    key: str
    figures: Path = FIGURES

    def figure(self, suffix: str = "") -> Path:
        """The path of this artefact's PNG; its folder exists."""
        self.figures.mkdir(parents=True, exist_ok=True)
        return self.figures / f"{self.paper}-{self.key}{suffix}.png"


@dataclass(frozen=True)
class Artefact:
    """One figure, table, equation or theorem of a paper that a command here regenerates."""

    key: str
    """As the paper numbers it: `figure-5`, `table-1`, `theorem-2`; one for several that come from
    the same runs: `figures-25-27`."""

    shows: str
    """The paper's content in one sentence."""

    run: Callable[[Context], Any]
    """Computes the artefact and returns its JSON data; deterministic."""

    minutes: float = 1.0
    """CPU minutes, roughly: the longest are started first."""


def data_folder(given: Path | None) -> Path:
    """The folder given, else `$CANOPY_DATA`, else `../shared/data` beside the project."""
    return given or Path(os.environ.get("CANOPY_DATA", ROOT.parent / "shared" / "data"))
