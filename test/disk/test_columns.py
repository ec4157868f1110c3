"""Columns of a damaged index file: checking them takes no more memory than they have."""

import tracemalloc

import pytest

from sglang_canopy.disk import columns
from sglang_canopy.disk.page import FIELDS, Kind

ROWS = 2_000
NUMBERS = sorted(name for name, kind in FIELDS.items() if kind in (Kind.SECONDS, Kind.OPTIONAL))


def peak_of(check, values) -> int:
    tracemalloc.start()
    try:
        check(values)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["whole", *NUMBERS])
def test_a_long_text_among_numbers_takes_no_memory_for_each_row(name) -> None:
    values = [1] * (ROWS - 1) + ["x" * 20_000]

    def check(given) -> None:
        if name == "whole":
            array, ok = columns.whole(given, 0, 10)
        else:
            array, ok = columns.field(name, given)
        assert not ok[-1]
        assert array[-1] == 0

    assert peak_of(check, values) < 4 * 20_000 * ROWS / 100
