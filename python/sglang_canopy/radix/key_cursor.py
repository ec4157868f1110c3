"""A position in a long key, for comparing tree nodes without slicing the rest of the key."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
from sglang.srt.mem_cache.radix_cache import RadixKey

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

TOKEN_BYTES = 8
"""Bytes of a token id in a key's array."""
_AT_ONCE = 1 << 12
"""Tokens compared at once: enough to be fast, few enough for keys that soon differ."""


class CappedKey(RadixKey):
    """A key that is rounded down to pages without a copy."""

    __slots__ = ()

    @classmethod
    def of(cls, key: RadixKey) -> CappedKey:
        """Return the same key; its tokens are shared."""
        return cls(key.token_ids, key.extra_key, key.is_bigram, key.limit, key.cache_salt)

    def page_aligned(self, page_size: int) -> RadixKey:
        logical = len(self) // page_size * page_size
        limit = logical + 1 if self.is_bigram and logical else logical
        return RadixKey(self.token_ids, self.extra_key, self.is_bigram, limit, self.cache_salt)


class KeyCursor:
    """Walks down a tree along ``key``: ``child``, then ``advance`` or ``advance_whole``.

    ``key``, or its first ``length`` tokens, must be whole pages.
    """

    __slots__ = ("_end", "_ids", "_key", "_last", "_page_size", "_pairs", "offset", "whole")

    def __init__(self, key: RadixKey, page_size: int, length: int | None = None) -> None:
        self._key = key
        self._ids: array[int] = key.token_ids
        self._page_size = page_size
        self._end = len(key) if length is None else length
        self._pairs = int(key.is_bigram)  # n pairs span n + 1 tokens
        self._last = self._end + self._pairs if self._end else 0
        self.offset = 0
        """Tokens (pairs, in a key of pairs) before the cursor."""
        self.whole = True
        """Whether the last ``advance`` passed all tokens of its node."""

    def child(self, node: UnifiedTreeNode) -> UnifiedTreeNode | None:
        """Return the child of ``node`` that may continue the key; ``None`` if there is none.

        An only child is returned without comparing its first page: below the root all are of one
        namespace, and building the key of a page takes longer than comparing it.
        """
        if self.offset >= self._end:
            return None
        children = node.children
        if len(children) == 1 and node.parent is not None:
            for only in children.values():
                return only
        return children.get(self._key.child_key_at(self.offset, self._page_size))

    def advance_whole(self, node: UnifiedTreeNode) -> bool:
        """Move past ``node``'s tokens, if the key continues with all of them."""
        raw = _raw(node.key)
        length = len(raw)
        end = self.offset + length
        if end > self._last:
            return False
        if length <= _AT_ONCE:
            if self._ids[self.offset : end] != raw:
                return False
        elif self._common(raw) < length:
            return False
        self.offset = end - self._pairs
        return True

    def advance(self, node: UnifiedTreeNode) -> int:
        """Move past the first pages of ``node`` that the key continues with. Returns their
        tokens."""
        before = self.offset
        self.whole = self.advance_whole(node)
        if not self.whole:
            shared = min(self._common(_raw(node.key)) - self._pairs, self._end - before)
            self.offset += max(shared, 0) // self._page_size * self._page_size
        return self.offset - before

    def _common(self, raw: array[int]) -> int:
        """Return the number of leading token ids that ``raw`` and the rest of the key have in
        common."""
        size = min(len(raw), self._last - self.offset)
        for at in range(0, size, _AT_ONCE):
            to = min(at + _AT_ONCE, size)
            mine, other = self._ids[self.offset + at : self.offset + to], raw[at:to]
            if mine != other:
                differ = np.frombuffer(mine, np.int64) != np.frombuffer(other, np.int64)
                return at + int(differ.argmax())
        return size


def _raw(key: RadixKey) -> array[int]:
    return key.token_ids if key.limit is None else key.raw_token_ids()
