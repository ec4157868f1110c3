"""Categories, conversations and tenants as small numbers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np

NO_LABEL = -1


class Labels:
    """Values as small numbers, each kept while a row uses it."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._values: list[Any] = []
        self._uses: list[int] = []
        self._free: list[int] = []

    def __getitem__(self, number: int) -> Any:
        return self._values[number]

    def __len__(self) -> int:
        return len(self._numbers)

    def capacity(self) -> int:
        """Numbers are below this."""
        return len(self._values)

    def take(self, value: Hashable) -> int:
        number = self._numbers.get(value)
        if number is None:
            if self._free:
                number = self._free.pop()
                self._values[number] = value
            else:
                number = len(self._values)
                self._values.append(value)
                self._uses.append(0)
            self._numbers[value] = number
        self._uses[number] += 1
        return number

    def number(self, value: Hashable) -> int:
        """The number of a value in use; ``NO_LABEL`` if it is not."""
        return self._numbers.get(value, NO_LABEL)

    def move(self, before: Any, number: int) -> None:
        """Uses of the labels in the array ``before`` become uses of ``number``."""
        old, counts = np.unique(before, return_counts=True)
        self._uses[number] += len(before)
        for each, count in zip(old.tolist(), counts.tolist()):
            self._uses[each] -= count - 1
            self.drop(each)

    def drop(self, number: int) -> None:
        self._uses[number] -= 1
        if self._uses[number] == 0:
            del self._numbers[self._values[number]]
            self._values[number] = None
            self._free.append(number)

    def uses(self) -> dict[Any, int]:
        """How many rows each value is in."""
        return {value: self._uses[number] for value, number in self._numbers.items()}

    def items(self) -> Iterator[tuple[int, Any]]:
        return ((number, value) for value, number in self._numbers.items())
