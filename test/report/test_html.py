"""The pages' templates: everything is escaped, and a page is self-contained."""

import re

from canopy_lab.report.html import HtmlTable, render, units


def plan_page(**given: object) -> str:
    values = {
        "title": "A plan",
        "overview": [],
        "choice": [],
        "about": {"example_prices": False},
        "figures": [],
        "tables": [],
        "facts": "",
        "version": "1",
    }
    return render("plan", **{**values, **given})


def test_texts_of_traces_and_users_are_escaped() -> None:
    tricky = "<script>alert('x')</script> & more"
    table = HtmlTable([tricky], [[tricky]])
    page = plan_page(
        title=tricky, overview=[tricky], choice=[tricky], facts=tricky, tables=[(tricky, table)]
    )
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 8


def test_a_number_and_its_unit_stay_on_one_line_and_words_are_escaped() -> None:
    assert units("12.5 % of <all> in 3 min") == "12.5&nbsp;% of &lt;all&gt; in 3&nbsp;min"


def test_the_chosen_row_stands_out_and_columns_of_words_are_flush_left() -> None:
    page = plan_page(tables=[("t", HtmlTable(["a", "b"], [["1", "x"], ["2", "y"]], [1], 1))])
    assert re.findall(r"<tr( class=chosen)?><td>(\d)", page) == [("", "1"), (" class=chosen", "2")]
    assert "<td class=text>x</td>" in page


def test_a_header_is_above_its_column() -> None:
    page = plan_page(tables=[("t", HtmlTable(["a", "b"], [["1", "x"]], [1]))])
    assert "<th>a</th><th class=text>b</th>" in page


def test_a_page_loads_nothing() -> None:
    page = plan_page(figures=[("what", "QUJD")])
    assert 'src="data:image/png;base64,QUJD"' in page
    assert not re.search(r"(?:src|href)=\"?https?:|<link|@import|url\(", page)
