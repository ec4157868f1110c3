"""The process's table of described pages is empty before and after each test of the storage."""

from collections.abc import Iterator

import pytest

from sglang_canopy.storage.page_table import PAGES


@pytest.fixture(autouse=True)
def empty_page_table() -> Iterator[None]:
    PAGES.clear()
    yield
    PAGES.clear()
