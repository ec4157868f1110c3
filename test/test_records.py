"""A leaf's fields are declared once; everything that copies a leaf or a request copies them all."""

from dataclasses import fields

from sglang_canopy.disk.page import PAGE_FIELDS, ColumnType, PageMeta
from sglang_canopy.records import GATEWAY, RECORD_FIELDS, Leaf, Request
from support.disk_pages import chain, content, store_at

VALUE_BY_TYPE = {
    ColumnType.FLAG: True,
    ColumnType.WHOLE: 7,
    ColumnType.SECONDS: 900.5,
    ColumnType.OPTIONAL: 1100.5,
}
OTHER_VALUES = {n: VALUE_BY_TYPE.get(type_, f"another {n}") for n, type_ in PAGE_FIELDS.items()}
OTHER_VALUES |= {"source": GATEWAY, "group": -1}
"""A value for each field that differs from its default; groups belong to a TTL table."""


def test_a_split_leaf_keeps_every_field() -> None:
    leaf, split_leaf = Leaf(), Leaf()
    for name in (*RECORD_FIELDS, "awaited_until"):
        setattr(leaf, name, OTHER_VALUES.get(name, 5.0))
    split_leaf.inherit(leaf)
    assert (split_leaf.offset, split_leaf.length, split_leaf.rank_state) == (0, 0, None)
    for name in (*RECORD_FIELDS[2:], "awaited_until"):
        assert getattr(split_leaf, name) == getattr(leaf, name), name


def test_every_field_of_a_page_survives_a_restart(tmp_path) -> None:
    store = store_at(tmp_path)
    (key,) = chain("a", 1)
    store.write([key], [content(key)], [PageMeta(**OTHER_VALUES)], [None])
    store.close()
    assert store_at(tmp_path).meta([key]) == [PageMeta(**OTHER_VALUES)]


def test_a_page_takes_every_field_of_its_leaf() -> None:
    leaf = Leaf()
    for name in RECORD_FIELDS:
        setattr(leaf, name, OTHER_VALUES[name])
    page_meta = PageMeta.from_leaf(leaf, ttl_s=OTHER_VALUES["ttl_s"])
    assert page_meta == PageMeta(**OTHER_VALUES)


def test_a_copy_of_a_request_equals_it_except_for_the_changes() -> None:
    request = Request(1.0)
    for field in fields(Request):
        setattr(request, field.name, f"another {field.name}")
    copy = request.copy(path=(), keep_until=None)
    names = [field.name for field in fields(Request)]
    changed_names = {name for name in names if getattr(copy, name) != getattr(request, name)}
    assert changed_names == {"path", "keep_until"}
