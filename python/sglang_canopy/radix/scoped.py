"""A value that holds for one ``with`` block."""

from __future__ import annotations

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

    def to(self, value: T | None) -> _Block[T]:
        return _Block(self, value)


class _Block(Generic[T]):
    """One ``with`` block. A class: a generator would cost a microsecond in every insert."""

    __slots__ = ("_outer", "_scoped", "_value")

    def __init__(self, scoped: Scoped[T], value: T | None) -> None:
        self._scoped, self._value = scoped, value

    def __enter__(self) -> None:
        self._outer, self._scoped.value = self._scoped.value, self._value

    def __exit__(self, *_: object) -> None:
        self._scoped.value = self._outer
