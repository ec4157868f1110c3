"""A document's stored chunks: one for each text it was encoded behind. All are pinned alike."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from sglang_canopy.chunk.chunk import chunk_key
from sglang_canopy.chunk.server.documents import DOCUMENT
from sglang_canopy.chunk.store import ChunkStore
from sglang_canopy.errors import CanopyError

MAX_DOCUMENTS = 1 << 16
"""Documents whose versions are remembered, and documents that may be pinned."""


class Versions:
    """Keys in the store by a document's name (the id that ``/canopy/chunks`` answers with)."""

    def __init__(self, store: ChunkStore, pinned: set[str] | None = None) -> None:
        self.store = store
        self.by_name: dict[str, set[str]] = {}
        self.pinned = pinned or set()

    def stored(self, key: str, ids: Sequence[int], salt: str) -> None:
        """A chunk was stored: a pinned document's is pinned."""
        if self._add(key, ids, salt) in self.pinned:
            self.store.pin(key)

    def seen(self, key: str, ids: Sequence[int], salt: str) -> None:
        """A chunk was found stored, by an earlier run perhaps."""
        name = chunk_key(ids, DOCUMENT, (), salt)
        if key not in self.by_name.get(name, ()):
            self.stored(key, ids, salt)

    def keys(self, name: str) -> set[str]:
        """Every version's key; what is no document's name is a chunk's own key."""
        return set(self.by_name.get(name, (name,)))

    def pin(self, name: str) -> bool:
        """Pin a document, or a chunk. False where nothing of it is stored."""
        if name in self.by_name and len(self.pinned) < MAX_DOCUMENTS:
            self.pinned.add(name)
        return sum(self.store.pin(key) for key in self.keys(name)) > 0

    def unpin(self, name: str) -> bool:
        """Undo :meth:`pin`. False where nothing was pinned."""
        self.pinned.discard(name)
        done = False
        for key in self.keys(name):
            with contextlib.suppress(CanopyError):
                done |= self.store.unpin(key)
        return done

    def delete(self, name: str) -> bool:
        """Forget a document in every version, or a chunk. False where nothing was stored."""
        keys = self.keys(name)
        self.pinned.discard(name)
        self.by_name.pop(name, None)
        return sum(self.store.delete(key) for key in keys) > 0

    def _add(self, key: str, ids: Sequence[int], salt: str) -> str:
        name = chunk_key(ids, DOCUMENT, (), salt)
        versions = self.by_name.setdefault(name, set())
        versions -= {one for one in versions if self.store.where(one) is None}
        versions.add(key)
        while len(self.by_name) > MAX_DOCUMENTS:
            self.by_name.pop(next(iter(self.by_name)))
        return name
