"""A place in a long key, from which nodes of the tree are compared without slicing the rest."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
from sglang.srt.mem_cache.radix_cache import RadixKey

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

TOKEN_BYTES = 8
"""Bytes of a token id in a key's array."""
_AT_ONCE = 1 << 15
"""Bytes compared at once: enough to be quick, little enough for keys that soon differ."""


class CappedKey(RadixKey):
    """A key that is rounded down to pages without being copied."""

    __slots__ = ()

    @classmethod
    def of(cls, key: RadixKey) -> CappedKey:
        """The same key; its tokens are shared."""
        return cls(key.token_ids, key.extra_key, key.is_bigram, key.limit, key.cache_salt)

    def page_aligned(self, page_size: int) -> RadixKey:
        logical = len(self) // page_size * page_size
        limit = logical + 1 if self.is_bigram and logical else logical
        return RadixKey(self.token_ids, self.extra_key, self.is_bigram, limit, self.cache_salt)


class KeyCursor:
    """Walks ``key`` down a tree: ``child``, then ``advance`` or ``advance_whole``.

    ``key``, or its first ``length`` tokens, are whole pages. Use it in a ``with`` block: while it is
    open the key's array cannot grow.
    """

    __slots__ = (
        "_bytes",
        "_end",
        "_key",
        "_last",
        "_page_size",
        "_pairs",
        "_tokens",
        "offset",
        "whole",
    )

    def __init__(self, key: RadixKey, page_size: int, length: int | None = None) -> None:
        self._key = key
        self._page_size = page_size
        self._end = len(key) if length is None else length
        self._pairs = int(key.is_bigram)  # n pairs are of n + 1 tokens
        self._last = (self._end + self._pairs) * TOKEN_BYTES if self._end else 0
        self.offset = 0
        """Tokens (pairs, in a key of pairs) behind the cursor."""
        self.whole = True
        """Whether ``advance`` went behind all of its node's tokens."""

    def __enter__(self) -> KeyCursor:
        self._tokens = memoryview(self._key.token_ids)
        self._bytes = self._tokens.cast("B")
        return self

    def __exit__(self, *_: object) -> None:
        self._bytes.release()
        self._tokens.release()

    def child(self, node: UnifiedTreeNode) -> UnifiedTreeNode | None:
        """The child of ``node`` that may go on like the key does; ``None`` if there is none.

        Of an only child not even the first page has been compared: below the root all are of one
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
        """Go behind ``node``'s tokens, if all of them come next."""
        raw = _raw(node.key)
        begin = self.offset * TOKEN_BYTES
        length = len(raw)
        end = begin + length * TOKEN_BYTES
        if end > self._last:
            return False
        if end - begin <= _AT_ONCE:
            if not self._bytes[begin:end].tobytes().startswith(raw):
                return False
        elif self._common(raw) < length:
            return False
        self.offset += length - self._pairs
        return True

    def advance(self, node: UnifiedTreeNode) -> int:
        """Go behind the pages that ``node`` begins with and that come next. Returns their tokens."""
        before = self.offset
        self.whole = self.advance_whole(node)
        if not self.whole:
            shared = min(self._common(_raw(node.key)) - self._pairs, self._end - before)
            self.offset += max(shared, 0) // self._page_size * self._page_size
        return self.offset - before

    def _common(self, raw: array[int]) -> int:
        """How many token ids ``raw`` and the rest of the key begin with in common."""
        size = min(len(raw) * TOKEN_BYTES, self._last - self.offset * TOKEN_BYTES)
        mine = self._bytes[self.offset * TOKEN_BYTES :]
        with memoryview(raw) as tokens, tokens.cast("B") as other:
            for at in range(0, size, _AT_ONCE):
                to = min(at + _AT_ONCE, size)
                if mine[at:to].tobytes() != other[at:to].tobytes():
                    differ = np.frombuffer(mine[at:to], np.int64) != np.frombuffer(
                        other[at:to], np.int64
                    )
                    return at // TOKEN_BYTES + int(differ.argmax())
        return size // TOKEN_BYTES


def _raw(key: RadixKey) -> array[int]:
    return key.token_ids if key.limit is None else key.raw_token_ids()
