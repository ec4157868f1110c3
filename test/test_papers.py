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


def numbered(kind: str, last: int, first: int = 1) -> list[str]:
    return [f"{kind} {number}" for number in range(first, last + 1)]


PAPERS: dict[str, list[str]] = {
    "wa": [*numbered("Figure", 29), *numbered("Table", 2)],
    "tail": [
        *(*numbered("Figure", 7), *numbered("Table", 6), *numbered("Theorem", 2), "Lemma 1"),
        *("Algorithm 1", *numbered("Equation", 8, first=4), "Equation 11"),
    ],
    "cachetune": [
        *(*numbered("Figure", 11), *numbered("Table", 2), *numbered("Equation", 13)),
        "Algorithm 1",
    ],
    "kareto": [
        *(*numbered("Figure", 17), *numbered("Table", 1), *numbered("Equation", 3)),
        *(*numbered("Algorithm", 2), *numbered("Observation", 6)),
    ],
}
"""Numbered items of each paper, counted in its text."""


def rows(paper: str) -> dict[str, list[str]]:
    """Return rows `| Figure 5 | contents | result | verdict | place |`, by the first cell."""
    table = {}
    for line in (PAGES / f"{paper}.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if re.match(r"(Figure|Table|Equation|Algorithm|Theorem|Lemma|Observation) ", cells[0]):
            for name in cells[0].split(", "):
                table[name] = cells[1:]
    return table


@pytest.mark.parametrize("paper", sorted(PAPERS))
def test_every_numbered_item_of_a_paper_has_a_row_with_its_result(paper: str) -> None:
    table = rows(paper)
    assert sorted(set(PAPERS[paper]) - set(table)) == []
    for name, cells in table.items():
        assert len(cells) == 4, f"{paper}, {name}: {len(cells)} cells, not 4"
        assert all(cells), f"{paper}, {name}: an empty cell"
        verdict = cells[2]
        assert verdict.startswith(VERDICTS), f"{paper}, {name}: {verdict!r}"
        if verdict.startswith(("differs", "not possible here")):
            assert len(verdict.split()) > 4, f"{paper}, {name}: no reason given"


@pytest.mark.parametrize("paper", sorted(PAPERS))
def test_the_target_of_a_row_exists(paper: str) -> None:
    results = {path.stem for path in (PAGES / paper).glob("*.json")}
    for name, cells in rows(paper).items():
        for code in re.findall(r"`([^`]+)`", cells[3]):
            exists = code in results or (ROOT / code).exists()
            assert exists, f"{paper}, {name}: {code} is no result and no file"
