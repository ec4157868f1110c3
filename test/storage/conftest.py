"""Pages that a test of the storage describes are its own."""

from collections.abc import Iterator

import pytest

from sglang_canopy.storage.page_table import PAGES


@pytest.fixture(autouse=True)
def empty_page_table() -> Iterator[None]:
    PAGES.clear()
    yield
    PAGES.clear()
