"""Building blocks of rendered pages: result files, rows, verdicts and tables."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAPERS = ROOT / "benchmark" / "papers" / "results"


@functools.cache
def load(path: str) -> Any:
    """The JSON file at ``path`` in the repository."""
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Results:
    """Result files of a paper: ``results["figure-5"]`` is the result of its run."""

    paper: str

    def __getitem__(self, key: str) -> Any:
        return load(f"benchmark/papers/results/{self.paper}/{key}.json")["result"]


@dataclass(frozen=True)
class Claim:
    """One statement of a paper, and whether our numbers agree with it."""

    says: str
    holds: bool
    mostly: bool = False
    """Whether it holds in more than half of its cells, if it has several."""


def over_cells(says: str, cells: Iterable[bool]) -> Claim:
    """A statement about many cells of a table: it holds if it does in every cell."""
    held = list(cells)
    count = sum(held)
    return Claim(f"{says} (in {count} of {len(held)})", count == len(held), 2 * count > len(held))


@dataclass(frozen=True)
class Row:
    """One figure, table or equation of a paper."""

    item: str
    claims: tuple[Claim, ...] = ()
    here: str = ""
    """Measured numbers."""

    where: str = ""
    """Keys of `run.py` and files, in backquotes."""

    shows: str = ""
    """Contents of the paper's item, if it is not a statement that numbers can test."""

    because: str = ""
    """Why a claim fails."""

    impossible: str = ""
    """Missing means for a test."""

    follows: str = ""
    """Source of the verdict, if there is no separate measurement."""

    calibrated: bool = False
    """Whether our trace was made to these numbers, so that they confirm nothing."""

    def verdict(self) -> str:
        """Return the verdict by rule.

        `reproduced`: every claim holds, in all its cells. `in part`: some claim does, or does in most
        of its cells. `differs`: none does. `calibrated`: our trace was made to hold it. `built`:
        there is no claim, and the tests named hold the code to the text.
        """
        if self.impossible:
            return f"not possible here: {self.impossible}"
        if self.follows:
            return f"follows from {self.follows}"
        if not self.claims:
            return "built"
        reason = f": {self.because}" if self.because else ""
        holds = [claim.holds for claim in self.claims]
        if all(holds):
            return "calibrated" if self.calibrated else "reproduced"
        some = any(claim.holds or claim.mostly for claim in self.claims)
        return f"in part{reason}" if some else f"differs{reason}"

    def statements(self) -> str:
        """Return the paper's statements. If only some hold, the others are marked."""
        some = any(claim.holds for claim in self.claims)
        verdicts = (
            f"(not) {c.says}" if some and not (c.holds or c.mostly) else c.says for c in self.claims
        )
        return self.shows or "; ".join(verdicts)


def near(ours: float, theirs: float, within: float = 0.25) -> bool:
    """Whether a number is reproduced: within a quarter of the paper's."""
    return abs(ours - theirs) <= within * abs(theirs)


def items(rows: Iterable[Row]) -> str:
    """The table of a paper's items."""
    cells = [
        [
            row.item,
            row.statements(),
            row.here,
            row.verdict(),
            row.where,
        ]
        for row in rows
    ]
    return table(["In the paper", "What it says", "Here", "Verdict", "Where"], cells)


def tally(rows: Iterable[Row]) -> dict[str, int]:
    """Count a paper's items by verdict."""
    kinds = (
        *("reproduced", "in part", "differs", "calibrated"),
        *("follows", "built", "not possible here"),
    )
    counts = dict.fromkeys(kinds, 0)
    for row in rows:
        kind = next(kind for kind in kinds if row.verdict().startswith(kind))
        counts[kind] += len(row.item.split(", "))
    return counts


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False) -> str:
    """A Markdown table; ``numbers``: all columns but the first are set flush right."""
    rule = f"|---|{('---:|' if numbers else '---|') * (len(header) - 1)}"
    first, *others = ("| " + " | ".join(cells) + " |" for cells in [header, *rows])
    return "\n".join([first, rule, *others])


def signed(value: float, digits: int = 1) -> str:
    """`+3.2`, and never `-0.0`."""
    return f"{round(value, digits) + 0.0:+.{digits}f}"


def change(new: float, old: float, digits: int = 1) -> str:
    """`+3.2 %`"""
    return f"{signed(100 * (new / old - 1), digits)} %"


def percent(share: float, digits: int = 1) -> str:
    """0.123 as `12.3 %`"""
    return f"{100 * share:.{digits}f} %"


def listed(values: Iterable[Any], form: str = "{}") -> str:
    """`1, 2 and 3`"""
    texts = [form.format(value) for value in values]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
