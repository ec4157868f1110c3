"""Prompts as chains of blocks, with shared prefixes and growing conversations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from synthetic.presets import BLOCK_TOKENS


class DrawnRequest(NamedTuple):
    """One drawn request; ``conversation`` and ``user`` are numbers of the source's own."""

    time_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    category: str
    turn: int
    conversation: int
    user: int
    has_next: bool
    """Another turn of this conversation follows."""


class SharedPrefix(NamedTuple):
    """A prefix that several prompts start with; its last tokens may not fill a block."""

    tokens: int
    blocks: tuple[int, ...]
    """Its full blocks only: the block with its end differs from prompt to prompt."""


class SharedPrompts(Sequence[SharedPrefix]):
    """System prompts, made once with block ids of their own."""

    def __init__(self, ids: itertools.count, lengths: Sequence[int]) -> None:
        self._prompts = [
            SharedPrefix(tokens, tuple(itertools.islice(ids, tokens // BLOCK_TOKENS)))
            for tokens in lengths
        ]

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._prompts[index]


class GrowingPrompt:
    """A prompt that grows at its end. Blocks are numbered by ``ids`` and never renumbered
    once full, so that equal ids mean equal prefixes."""

    __slots__ = ("_full_blocks", "_ids", "_shared", "tokens")

    def __init__(self, ids: itertools.count, shared: SharedPrefix | None = None) -> None:
        self._ids = ids
        self._shared = shared or SharedPrefix(0, ())
        self._full_blocks = list(self._shared.blocks)
        self.tokens = self._shared.tokens

    def extend(self, tokens: int) -> None:
        """Append ``tokens`` new tokens."""
        self.tokens += tokens
        new_blocks = self.tokens // BLOCK_TOKENS - len(self._full_blocks)
        self._full_blocks.extend(itertools.islice(self._ids, new_blocks))

    def drop_oldest(self, keep_tokens: int) -> None:
        """Shorten to the system prompt and about ``keep_tokens``: nothing behind the system
        prompt is a known prefix any more."""
        self._full_blocks = list(self._shared.blocks)
        self.tokens = self._shared.tokens
        self.extend(max(0, keep_tokens - self.tokens))

    def as_shared(self) -> SharedPrefix:
        """The prompt as it stands, as a prefix for others."""
        return SharedPrefix(self.tokens, tuple(self._full_blocks))

    def blocks(self) -> tuple[int, ...]:
        """Block ids of the prompt as it stands; a partial last block gets an id of its own."""
        if self.tokens % BLOCK_TOKENS:
            return (*self._full_blocks, next(self._ids))
        return tuple(self._full_blocks)
