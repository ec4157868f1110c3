"""The reports' page: everything is escaped, and a page is self-contained."""

import re

from canopy_lab.report.html import HtmlPage, HtmlTable, Section


def make_html(*sections: Section, title: str = "t", **fields: object) -> str:
    return HtmlPage(title, sections, command="plan", source=".", **fields).html()  # type: ignore[arg-type]


def test_texts_of_traces_and_users_are_escaped() -> None:
    tricky = "<script>alert('x')</script> & more"
    table = HtmlTable([tricky], [[tricky]])
    section = Section(tricky, [tricky], b"png", table=table, points=[tricky])
    page = make_html(
        section, title=tricky, box=[tricky], steps=[(tricky, tricky)], lead=[tricky], notes=[tricky],
        details=[tricky],
    )  # fmt: skip
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 14


def test_a_page_loads_nothing() -> None:
    page = make_html(Section("h", figure=b"ABC"))
    assert page.count('src="data:image/png;base64,QUJD"') == 1
    assert not re.search(r"(?:src|href)=\"?https?:|<link|@import|url\(", page)
