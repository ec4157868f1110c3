"""Every measured number of README and of a results page stands in a result file that the page names."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
GUIDES = [ROOT / "docs/index.md", *sorted((ROOT / "docs/guide").glob("*.md"))]
RESULT_PAGES = sorted((ROOT / "docs/research").rglob("*.md"))
RESULT_FILE = re.compile(r"`(benchmark/[\w/.-]+\.(?:md|json))`")
NUMBER = r"(?<![\w.,-])[+-]?\d[\d,]*(?:\.\d+)?(?![\w.]*\d)"
UNIT = r" ?(?:%|points?\b|times\b|x\b|[um]?s\b|[KMGT]i?B\b)"
MEASURED = re.compile(rf"{NUMBER}(?={UNIT})|(?<=\| ){NUMBER}(?= \|)|(?<![\w.,-])\d+\.\d+(?![\w.])")
"""A number with a unit, with decimals, or alone in a cell."""
NOT_MEASURED = re.compile(
    r"`[^`\n]*`|\]\([^)\s]*\)|^(?:    |#).*$|(?:SGLang|Python|arXiv|[Ss]ections?) [\d.]+", re.M
)
"""Settings and goals in backquotes, links, code, headings, versions and places in a paper."""


def named_files(text: str) -> set[Path]:
    """Return the result files that a text names."""
    return {ROOT / name for name in RESULT_FILE.findall(text)}


def numbers_in(text: str) -> list[float]:
    return [
        float(number.replace(",", ""))
        for number in re.findall(r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?", text)
    ]


def missing_numbers(text: str, paths: set[Path]) -> list[str]:
    """Return the measured numbers that no file of ``files`` has, exactly or before rounding. The
    numbers of a table's row stand together in one line of a file."""
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    by_line = [numbers_in(line) for line in lines]
    all_values = [[n for line in by_line for n in line]]
    missing = []
    for line in NOT_MEASURED.sub("", text).splitlines():
        value_lists = by_line if line.startswith("|") else all_values
        measured = [n.replace(",", "") for n in MEASURED.findall(line)]
        candidates = ([n for n in measured if not is_among(n, values)] for values in value_lists)
        missing += min(candidates, key=len, default=measured) if measured else []
    return missing


def is_among(number: str, values: list[float]) -> bool:
    decimals = len(number.partition(".")[2])
    return any(abs(round(value, decimals) - float(number)) < 1e-9 for value in values)


@pytest.mark.parametrize("page", RESULT_PAGES, ids=lambda page: page.stem)
def test_a_result_stands_in_a_file_that_the_page_names(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not named_files(text) or missing_numbers(text, named_files(text)) == []


@pytest.mark.parametrize("page", [README, *GUIDES], ids=lambda page: page.stem)
def test_a_result_beside_a_link_stands_in_a_file_that_the_linked_page_names(page: Path) -> None:
    for line in page.read_text(encoding="utf-8").splitlines():
        links = re.findall(r"\]\(([^)#:\s]+\.md)", line)
        pages = [(page.parent / link).read_text(encoding="utf-8") for link in links]
        result_files = named_files(" ".join(pages))
        if page == README or (result_files and "research/" in line):
            assert missing_numbers(line, result_files) == [], line


RESULT_KINDS = {"served over HTTP", "at the scheduler", "simulated"}
README_ROW = re.compile(r"^\|.*?\| \[([^]]+)\]\((benchmark/[^)]+\.json)\) \|", re.M)


def test_the_kind_of_every_result_of_readme_is_that_of_its_file() -> None:
    text = README.read_text(encoding="utf-8")
    table = text[text.index("## Results") :].split("\n## ")[0]
    rows = README_ROW.findall(text)
    assert len(rows) == sum(line.startswith("| [") for line in table.splitlines()) >= 5
    for kind, file in rows:
        assert kind in RESULT_KINDS
        assert json.loads((ROOT / file).read_text(encoding="utf-8"))["kind"] == kind, file


def test_readme_has_at_most_420_words() -> None:
    assert len(README.read_text(encoding="utf-8").split()) <= 420
