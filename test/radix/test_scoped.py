"""A value for one ``with`` block, and nothing after it."""

from __future__ import annotations

import pytest

from sglang_canopy.radix.scoped import Scoped


def test_the_value_is_gone_after_an_exception() -> None:
    scoped: Scoped[int] = Scoped()

    def fails() -> None:
        with scoped.to(1):
            assert scoped.value == 1
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert scoped.value is None


def test_an_inner_block_gives_the_outer_value_back() -> None:
    scoped: Scoped[int] = Scoped()
    with scoped.to(1):
        with scoped.to(2):
            assert scoped.value == 2
        assert scoped.value == 1
