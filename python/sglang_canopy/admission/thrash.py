"""Share of prefill tokens recomputed because an active session's KV was evicted."""

from __future__ import annotations

from collections import deque

_PARTS = 64
"""Parts of a capacity that the window moves by; bounds its entries."""


class Thrash:
    """Thrash over the most recent computed prompt tokens, one capacity's worth."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.lost = 0
        """Computed tokens that an active session's last turn had left."""
        self.computed = 0
        self._parts: deque[list[int]] = deque()
        """``lost`` and ``computed`` of each part, the newest last."""

    @property
    def share(self) -> float:
        """Share of the computed tokens that were lost."""
        return self.lost / self.computed if self.computed else 0.0

    def answered(self, lost: int, computed: int) -> None:
        """Record a prompt: ``computed`` prefilled tokens, ``lost`` of them recomputed."""
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
        """Reset all counts."""
        self.lost = self.computed = 0
        self._parts.clear()
