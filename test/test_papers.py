"""benchmark/papers/results: a row for everything the four papers number, none of them empty.

What a paper numbers is counted here from its text, not from our table.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARK = ROOT / "benchmark" / "papers"
PAGES = BENCHMARK / "results"
VERDICTS = (
    *("reproduced", "in part", "differs", "calibrated"),
    *("follows", "built", "not possible here"),
)


def items_of(item_kind: str, last: int, first: int = 1) -> list[str]:
    return [f"{item_kind} {number}" for number in range(first, last + 1)]


ITEMS_BY_PAPER: dict[str, list[str]] = {
    "wa": [*items_of("Figure", 29), *items_of("Table", 2)],
    "tail": [
        *(*items_of("Figure", 7), *items_of("Table", 6), *items_of("Theorem", 2), "Lemma 1"),
        *("Algorithm 1", *items_of("Equation", 8, first=4), "Equation 11"),
    ],
    "cachetune": [
        *(*items_of("Figure", 11), *items_of("Table", 2), *items_of("Equation", 13)),
        "Algorithm 1",
    ],
    "kareto": [
        *(*items_of("Figure", 17), *items_of("Table", 1), *items_of("Equation", 3)),
        *(*items_of("Algorithm", 2), *items_of("Observation", 6)),
    ],
}
"""Numbered items of each paper, counted in its text."""


def rows_of(paper: str) -> dict[str, list[str]]:
    """Return rows `| Figure 5 | contents | result | verdict | place |`, by the first cell."""
    table = {}
    for line in (PAGES / f"{paper}.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if re.match(r"(Figure|Table|Equation|Algorithm|Theorem|Lemma|Observation) ", cells[0]):
            for name in cells[0].split(", "):
                table[name] = cells[1:]
    return table


@pytest.mark.parametrize("paper", sorted(ITEMS_BY_PAPER))
def test_every_numbered_item_of_a_paper_has_a_row_with_its_result(paper: str) -> None:
    table = rows_of(paper)
    assert sorted(set(ITEMS_BY_PAPER[paper]) - set(table)) == []
    for name, cells in table.items():
        assert len(cells) == 4, f"{paper}, {name}: {len(cells)} cells, not 4"
        assert all(cells), f"{paper}, {name}: an empty cell"
        verdict = cells[2]
        assert verdict.startswith(VERDICTS), f"{paper}, {name}: {verdict!r}"
        if verdict.startswith(("differs", "not possible here")):
            assert len(verdict.split()) > 4, f"{paper}, {name}: no reason given"


@pytest.mark.parametrize("paper", sorted(ITEMS_BY_PAPER))
def test_the_target_of_a_row_exists(paper: str) -> None:
    results = {path.stem for path in (PAGES / paper).glob("*.json")}
    for name, cells in rows_of(paper).items():
        for target in re.findall(r"`([^`]+)`", cells[3]):
            is_found = target in results or (ROOT / target).exists()
            assert is_found, f"{paper}, {name}: {target} is no result and no file"
