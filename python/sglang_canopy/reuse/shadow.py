"""The shadow index: who came back to which path, whatever is resident.

One record a request: the *tip* its path ends at. A later request whose path runs through the
tip continues it, which is one reuse sample of the tip's category (the gap between the two
arrivals). A tip nobody has continued is a censored sample. What the cache holds plays no part,
so a policy does not learn from its own evictions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from sglang_canopy.policy.base import Request
from sglang_canopy.reuse.categories import Category


class Tip:
    """Where one request's path ends, and what became of it."""

    __slots__ = (
        "born",
        "category",
        "gap_bin",
        "gap_s",
        "growth_bin",
        "history",
        "keys",
        "open",
        "own_gap_s",
        "return_at",
        "said_over",
        "started",
        "turn",
    )

    def __init__(self, born: float, category: Category) -> None:
        self.born = born
        self.started = born
        """Arrival of the conversation's first request seen."""
        self.category = category
        self.turn = 1
        self.own_gap_s: float | None = None
        """Moving average of this conversation's own gaps."""
        self.history = 0
        """Prompt and output tokens."""
        self.keys: tuple[int, ...] = ()
        self.open = True
        """Nobody has continued it yet."""
        self.gap_bin = 0
        self.gap_s = 0.0
        self.growth_bin = 0
        self.return_at: float | None = None
        self.said_over = False


def tip_key(path: Sequence[int], tokens: int, block_tokens: int) -> int | None:
    """The hash of the last full block of ``tokens`` tokens; a partial one changes with the next
    turn. Of a path shorter than one block, that block; ``None`` for an empty path."""
    if not path:
        return None
    full = tokens // block_tokens if tokens > 0 else len(path)
    return path[max(0, min(full, len(path)) - 1)]


class ShadowIndex:
    """Tips by chained block hash, in a window bounded in time and in number.

    A tip born before the window is forgotten: whatever it was, every younger one was born with
    the same chance to be seen, so censoring stays honest.
    """

    def __init__(self, window_s: float, cap: int) -> None:
        self.window_s = window_s
        self.cap = cap
        self._by_key: dict[int, Tip] = {}
        self._window: deque[Tip] = deque()

    def __len__(self) -> int:
        return len(self._window)

    def __iter__(self) -> Iterator[Tip]:
        """Every tip of the window, oldest first."""
        return iter(self._window)

    def follow(self, request: Request) -> Tip | None:
        """The deepest open tip that the request's path runs through, taken out of the index."""
        by_key = self._by_key
        for block in reversed(request.path):
            tip = by_key.get(block)
            if tip is not None:
                self._forget(tip)
                return tip
        return None

    def add(self, tip: Tip, request: Request) -> list[Tip]:
        """Open ``tip`` at the end of the request's path. Returns the tips that left the window."""
        self._window.append(tip)
        self.extend(tip, request, request.prompt_tokens)
        horizon = request.time - self.window_s
        left = []
        while len(self._window) > self.cap or self._window[0].born < horizon:
            old = self._window.popleft()
            if old.open:
                self._forget(old)
            left.append(old)
        return left

    def extend(self, tip: Tip, request: Request, tokens: int) -> None:
        """Let ``tip`` be found at the last full block of the path's first ``tokens`` tokens too."""
        key = tip_key(request.path, tokens, request.block_tokens)
        if key is None or key in tip.keys or not tip.open:
            return
        other = self._by_key.get(key)
        if other is not None and other is not tip:
            other.keys = tuple(k for k in other.keys if k != key)
        self._by_key[key] = tip
        tip.keys = (*tip.keys, key)[-2:]

    def pending(self, request: Request) -> Tip | None:
        """The open tip that this very request made when it arrived."""
        key = tip_key(request.path, request.prompt_tokens, request.block_tokens)
        tip = self._by_key.get(key) if key is not None else None
        return tip if tip is not None and tip.born == request.time else None

    def _forget(self, tip: Tip) -> None:
        for key in tip.keys:
            self._by_key.pop(key, None)
        tip.keys = ()
