"""Pages show the numbers of the result files unchanged."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import result_pages
from result_tables import Template, claim, statements, tally, verdict

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
def test_a_result_next_to_a_link_is_on_the_linked_page(page) -> None:
    assert [(line, number) for line, number, holds in results_quoted(page) if not holds] == []


def test_results_are_quoted() -> None:
    assert len(results_quoted(result_pages.ROOT / "README.md")) > 10


def test_a_verdict_follows_from_its_claims() -> None:
    yes, no = claim("it is less", True), claim("it is none", False)
    assert verdict([yes]) == "reproduced"
    assert verdict([yes, no], "of it") == "in part: of it"
    assert statements([yes, no]) == "it is less; (not) it is none"
    assert verdict([no], "of it") == "differs: of it"


def test_a_statement_about_many_cells_is_judged_over_all_of_them() -> None:
    every, most, few = (claim("it is less", [True] * n + [False] * (4 - n)) for n in (4, 3, 1))
    assert verdict([every]) == "reproduced"
    assert verdict([most], "of it") == "in part: of it"
    assert verdict([few], "of it") == "differs: of it"
    assert few.says == "it is less (in 1 of 4)"


def test_a_trace_made_to_a_number_does_not_reproduce_it() -> None:
    assert verdict([claim("62 %", True)], "calibrated") == "calibrated"
    assert (
        tally("| Figure 4, Figure 5 | 62 % | 62.1 % | calibrated | `figures-4-5` |")["calibrated"]
        == 2
    )


ITEMS = """Text that no page has.

## items

| In the paper | What it says | Here | Verdict | Where |
|---|---|---|---|---|
| Figure 1 | [less than half](shares < 0.5); [A near 0.12](shares[A] ~ 0.12) | {shares:.1p}, {both:+.1f} | of it | `a` |
| Figure 2 | [more](shares[A] > shares[B]); [in all](cells) | {called} |  | `b` |
| Figure 3 | a sketch | none | built | `c` |
"""


def test_a_template_has_the_values_of_a_module_and_judges_its_statements(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(ITEMS)
    values = SimpleNamespace(
        shares={"A": 0.123, "B": 0.6}, both=[-0.04, 2], called=lambda: "1 s", cells=[True, False]
    )
    assert Template(tmp_path / "page.md", values).parts()["items"]().splitlines()[2:] == [
        "| Figure 1 | (not) less than half; A near 0.12 | 12.3 % (A), 60.0 % (B), +0.0 and +2.0 "
        "| in part: of it | `a` |",
        "| Figure 2 | more; in all (in 1 of 2) | 1 s | differs | `b` |",
        "| Figure 3 | a sketch | none | built | `c` |",
    ]


def test_tables_of_which_most_cells_are_worse_are_not_reproduced() -> None:
    rows = re.findall(
        r"^\| (.*?) \|.* \| (.*?) \| [^|]*\|$",
        result_pages.parts("papers/tail/page.md")["items"](),
        re.M,
    )
    verdicts = dict(rows)
    for item in ("Table 1", "Table 2", "Table 4", "Table 5", "Figure 3"):
        assert not verdicts[item].startswith("reproduced"), item
