"""Thrash, measured: how much of the prefill computes again what live sessions had left."""

from __future__ import annotations

from collections import deque

_PARTS = 64
"""The window moves in parts of a capacity: so many entries at most, however short prompts are."""


class Thrash:
    """Over the last capacity's worth of computed prompt tokens."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.lost = 0
        """Tokens computed that a live session's last turn had left."""
        self.computed = 0
        self._parts: deque[list[int]] = deque()
        """Of each part ``lost`` and ``computed``, the newest last."""

    @property
    def share(self) -> float:
        """Of the tokens computed, those that had been there."""
        return self.lost / self.computed if self.computed else 0.0

    def answered(self, lost: int, computed: int) -> None:
        """A prompt of which ``computed`` tokens were prefilled, ``lost`` of them once more."""
        parts = self._parts
        if not parts or parts[-1][1] * _PARTS >= self.capacity_tokens:
            parts.append([0, 0])
        parts[-1][0] += lost
        parts[-1][1] += computed
        self.lost += lost
        self.computed += computed
        while self.computed - parts[0][1] >= self.capacity_tokens:
            lost, computed = parts.popleft()
            self.lost -= lost
            self.computed -= computed

    def clear(self) -> None:
        """Forget what was measured."""
        self.lost = self.computed = 0
        self._parts.clear()
