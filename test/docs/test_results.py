"""Pages show the numbers of the result files unchanged."""

import re
from pathlib import Path

import pytest

import result_pages
from result_tables import Claim, Row, over_cells, tally

PAGES = result_pages.pages()
MARKED = [path for path in PAGES if result_pages.BLOCK.search(path.read_text(encoding="utf-8"))]
GUIDES = sorted((result_pages.ROOT / "docs" / "guide").glob("*.md"))
PAPERS = result_pages.ROOT / "docs" / "research" / "papers"


def test_no_page_differs_from_its_result_files() -> None:
    stale = [str(path.relative_to(result_pages.ROOT)) for path in result_pages.stale_pages()]
    assert stale == [], "run: python scripts/result_pages.py"


@pytest.mark.parametrize("page", MARKED, ids=lambda page: page.name)
def test_a_changed_digit_is_seen(page) -> None:
    text = page.read_text(encoding="utf-8")
    start, _, _, shown, _ = result_pages.BLOCK.search(text).groups()
    digit = re.search(r"\d", shown)
    other = str((int(digit[0]) + 1) % 10)
    changed = shown[: digit.start()] + other + shown[digit.end() :]
    assert result_pages.render(text.replace(start + shown, start + changed, 1)) == text


@pytest.mark.parametrize("page", MARKED, ids=lambda page: page.name)
def test_marks_are_closed(page) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- results: ") == len(result_pages.BLOCK.findall(text))


def test_every_part_is_shown() -> None:
    shown: dict[str, set[str]] = {}
    for page in MARKED:
        for _, file, name, _, _ in result_pages.BLOCK.findall(page.read_text(encoding="utf-8")):
            shown.setdefault(file, set()).add(name)
    for file, names in shown.items():
        assert names == set(result_pages.parts(file)), f"benchmark/{file}"


@pytest.mark.parametrize("page", sorted(PAPERS.glob("*.md")), ids=lambda page: page.name)
def test_the_papers_pages_have_no_result_outside_a_mark(page) -> None:
    if page not in MARKED:
        pytest.skip("no part of it is written from results")
    text = result_pages.BLOCK.sub("", page.read_text(encoding="utf-8"))
    text = re.sub(r"`[^`\n]*`|arXiv [\d.]+|[Ss]ections? [\d.]+", "", text)
    assert re.findall(r".*\d\.\d.*|.*\d %.*", text) == []


RENDERED = [result_pages.ROOT / "README.md", result_pages.ROOT / "docs/index.md", *GUIDES]
"""Pages on which every result is rendered."""
UNIT = (
    r"(?:%|points?\b|times\b|x\b|[unm]?s\b|seconds?\b|minutes?\b|hours?\b|[KMGT]i?B\b|USD\b|of \d)"
)
QUANTITY = r"(?<![\w.,-])[+-]?\d[\d,]*(?:\.\d+)?(?!(?!x\b)\w)(?!\.\d)"
MEASURED = re.compile(
    rf"{QUANTITY}(?= ?{UNIT})|(?<![\w.-])\d+\.\d+(?![\w.])|(?<=\| ){QUANTITY}(?= \|)"
)
"""A result: a number with a unit, with a decimal point, or alone in the cell of a table."""
UNMEASURED = re.compile(
    r"<!--.*?-->|^```.*?^```|^(?: {4}|#).*?$|`[^`\n]*`|\]\([^)\s]*\)"
    r"|(?:SGLang|Python|Prometheus|version|arXiv|vLLM|from|[Ss]ections?|[Ff]igures?|[Tt]ables?) [\d.]+",
    re.DOTALL | re.MULTILINE,
)
"""Code and quoted values (flags, defaults, limits), headings, links, versions, places in a paper."""


def measured(text: str) -> list[str]:
    return MEASURED.findall(UNMEASURED.sub(" ", text))


def shares(page: Path) -> tuple[int, int]:
    """Results of a page that are rendered, and all of them."""
    text = page.read_text(encoding="utf-8")
    rendered = sum(len(measured(block[3])) for block in result_pages.BLOCK.findall(text))
    return rendered, rendered + len(measured(result_pages.BLOCK.sub(" ", text)))


@pytest.mark.parametrize("page", RENDERED, ids=lambda page: page.name)
def test_every_result_is_rendered(page) -> None:
    rendered, count = shares(page)
    written_by_hand = measured(result_pages.BLOCK.sub(" ", page.read_text(encoding="utf-8")))
    assert rendered == count, written_by_hand


def test_readme_and_start_page_have_results() -> None:
    assert shares(RENDERED[0])[0] > 15
    assert shares(RENDERED[1])[0] > 5


@pytest.mark.parametrize(
    ("text", "results"),
    [
        ("LRU hits 59.0 %, 4.8x faster, in 6 of 16 cells", ["59.0", "4.8", "6"]),
        ("took 84 s and 301 MB", ["84", "301"]),
        ("| lru | 104 | +1.2 |", ["104", "+1.2"]),
        ("SGLang 0.5.23 on Python 3.11 gives 401 (arXiv 2506.02634, Section 4.3, Figure 5)", []),
        ("at most `64 MiB`, see [it](a.md#5-s)\n\n    canopy plan --slo 2 s\n", []),
    ],
)
def test_a_result_is_a_number_that_was_measured(text: str, results: list[str]) -> None:
    assert measured(text) == results


def tables(text: str) -> list[str]:
    return re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)


@pytest.mark.parametrize(
    "page",
    sorted((result_pages.ROOT / "docs/research").rglob("*.md")),
    ids=lambda page: page.name,
)
def test_tables_of_results_are_rendered_whole(page) -> None:
    text = page.read_text(encoding="utf-8")
    own = tables(result_pages.BLOCK.sub("", text))
    assert [table.splitlines()[0] for table in own if len(measured(table)) > 2] == []


NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
RESULT = re.compile(rf"({NUMBER.pattern})(?= ?(?:%|points|times|x\b|us\b|s\b|ms\b))")


def page_and_tables(page: Path) -> str:
    """Return a research page with the tables of results that it names."""
    text = page.read_text(encoding="utf-8")
    tables = re.findall(r"`(benchmark/\w+/results/\w+\.md)`", text)
    return " ".join([text, *((result_pages.ROOT / t).read_text(encoding="utf-8") for t in tables)])


def results_quoted(page: Path) -> list[tuple[str, str, bool]]:
    """Every result in a line that links to research pages: line, number, and whether one of these
    pages has it, or a number that rounds to it."""
    found = []
    for line in page.read_text(encoding="utf-8").splitlines():
        links = re.findall(r"\]\(([^)#\s]*research/[\w/-]+\.md)", line)
        pages = " ".join(page_and_tables(page.parent / link) for link in links)
        known = {float(number.replace(",", "")) for number in NUMBER.findall(pages)}
        for text in RESULT.findall(re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", "", line)):
            number = text.replace(",", "")
            digits = len(number.partition(".")[2])
            holds = any(abs(round(one, digits) - float(number)) < 1e-9 for one in known)
            if links:
                found.append((line[:80], text, holds))
    return found


@pytest.mark.parametrize("page", [result_pages.ROOT / "README.md", *GUIDES], ids=lambda p: p.name)
def test_a_result_beside_a_link_stands_on_the_page_that_is_linked(page) -> None:
    assert [(line, number) for line, number, holds in results_quoted(page) if not holds] == []


def test_results_are_quoted() -> None:
    assert len(results_quoted(result_pages.ROOT / "README.md")) > 10


def test_a_verdict_follows_from_its_claims() -> None:
    yes, no = Claim("it is less", True), Claim("it is none", False)
    assert Row("Figure 1", (yes,)).verdict() == "reproduced"
    part = Row("Figure 1", (yes, no), because="of it")
    assert (part.verdict(), part.statements()) == ("in part: of it", "it is less; (not) it is none")
    assert Row("Figure 1", (no,), because="of it").verdict() == "differs: of it"
    assert Row("Figure 1", shows="a sketch").verdict() == "built"


def test_a_statement_about_many_cells_is_judged_over_all_of_them() -> None:
    every, most, few = (over_cells("it is less", [True] * n + [False] * (4 - n)) for n in (4, 3, 1))
    assert Row("Table 1", (every,)).verdict() == "reproduced"
    assert Row("Table 1", (most,), because="of it").verdict() == "in part: of it"
    assert Row("Table 1", (few,), because="of it").verdict() == "differs: of it"
    assert few.says == "it is less (in 1 of 4)"


def test_a_trace_made_to_a_number_does_not_reproduce_it() -> None:
    row = Row("Figure 4", (Claim("62 %", True),), calibrated=True)
    assert row.verdict() == "calibrated"
    assert tally([row])["calibrated"] == 1


def test_tables_of_which_most_cells_are_worse_are_not_reproduced() -> None:
    from tail.page import all_rows

    verdicts = {row.item: row.verdict() for row in all_rows()}
    for item in ("Table 1", "Table 2", "Table 4", "Table 5", "Figure 3"):
        assert not verdicts[item].startswith("reproduced"), item
