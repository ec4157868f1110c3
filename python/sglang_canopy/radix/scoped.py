"""A value that holds for one ``with`` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Scoped(Generic[T]):
    """``value`` inside ``with scoped.to(value)``, ``None`` outside, also after an exception.

    NOTE: for what cannot be an argument. Between a method of the cache that we override and the
    method of the tree core or component that is called in the end lie only SGLang's functions,
    with SGLang's signatures; ``InsertParams`` does not help, since SGLang copies it field by field.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: T | None = None

    @contextmanager
    def to(self, value: T) -> Iterator[None]:
        outer, self.value = self.value, value
        try:
            yield
        finally:
            self.value = outer
