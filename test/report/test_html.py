"""The reports' page: everything is escaped, and a page is self-contained."""

import re

from canopy_lab.report.html import HtmlTable, Page, Section, units


def html(*sections: Section, title: str = "t", **fields: object) -> str:
    return Page(title, sections, command="plan", source=".", **fields).html()  # type: ignore[arg-type]


def test_texts_of_traces_and_users_are_escaped() -> None:
    tricky = "<script>alert('x')</script> & more"
    section = Section(
        tricky, [tricky], b"png", table=HtmlTable([tricky], [[tricky]]), points=[tricky]
    )
    page = html(
        section, title=tricky, box=[tricky], steps=[(tricky, tricky)], lead=[tricky], notes=[tricky],
        details=[tricky],
    )  # fmt: skip
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 14


def test_a_number_and_its_unit_stay_on_one_line_and_words_are_escaped() -> None:
    assert units("12.5 % of <all> in 3 min") == "12.5&nbsp;% of &lt;all&gt; in 3&nbsp;min"


def test_the_chosen_row_stands_out_and_columns_of_words_are_flush_left_below_their_heads() -> None:
    page = html(Section("h", table=HtmlTable(["a", "b"], [["1", "x"], ["2", "y"]], [1], 1)))
    assert re.findall(r"<tr( class=chosen)?><td>(\d)", page) == [("", "1"), (" class=chosen", "2")]
    assert "<th>a</th><th class=text>b</th>" in page
    assert "<td class=text>x</td>" in page


def test_a_page_loads_nothing() -> None:
    page = html(Section("h", figure=b"ABC"))
    assert page.count('src="data:image/png;base64,QUJD"') == 1
    assert not re.search(r"(?:src|href)=\"?https?:|<link|@import|url\(", page)
