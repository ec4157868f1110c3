"""Pins of documents: all stored chunks of a pinned document are pinned, whatever their prefix."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence

from canopy_chunks import TENANT_SHARE
from canopy_chunks.store.store import ChunkStore
from canopy_chunks.text.documents import document_name

PINNED_SHARE = 0.25
"""Share of the store's bytes that all tenants' pins may hold together, or a single tenant's share
if that is larger."""


class DocumentPins:
    """Pinned documents, by name (the id that ``/canopy/chunks`` returns) and tenant.

    A tenant may pin ``share`` of the store's bytes. No decision depends on a clock, so every rank
    of a split model pins alike. earlier: pins of previous weights, whose documents will be stored
    again.
    """

    def __init__(
        self, store: ChunkStore, share: float = TENANT_SHARE, earlier: DocumentPins | None = None
    ) -> None:
        self.store, self.share = store, share
        self.documents: set[tuple[str, str | None]] = (
            set() if earlier is None else earlier.documents
        )
        self.chunks: dict[str, tuple[str | None, int]] = {}
        self.pinned_bytes: Counter[str | None] = Counter()
        """Bytes of pinned chunks, by tenant."""
        forget = weakref.WeakMethod(self._forget)
        # A strong reference would be a cycle, and keep a replaced store in memory until garbage
        # collection.
        store.pinned_removed = lambda key: (own := forget()) and own(key)

    def stored(self, key: str, name: str, tenant: str | None) -> None:
        """Pin a newly stored chunk of a pinned document, if its tenant's share allows it."""
        if (name, tenant) in self.documents:
            self._pin([key], tenant)

    def keys(self, name: str, tenant: str | None) -> list[str]:
        """Return the keys of the tenant's stored document; empty for another tenant's document."""
        keys = self.store.of_document(name)
        chunk = self.store.look(keys[0]) if keys else None
        return keys if chunk is not None and document_name(chunk.ids, tenant) == name else []

    def pin(self, name: str, tenant: str | None) -> bool:
        """Pin a document. Returns False if none of it is stored, or its tenant's pins are full."""
        keys = self.keys(name, tenant)
        if not keys or not self._pin(keys, tenant):
            return False
        self.documents.add((name, tenant))
        return True

    def unpin(self, name: str, tenant: str | None) -> bool:
        """Undo :meth:`pin`. Returns False if no chunk was pinned."""
        self.documents.discard((name, tenant))
        held = [key for key in self.keys(name, tenant) if key in self.chunks]
        for key in held:
            self._forget(key)
            if self.store.pins(key):
                self.store.unpin(key)
        return bool(held)

    def _pin(self, keys: Sequence[str], tenant: str | None) -> bool:
        """Pin all of these stored chunks, or none if they would exceed the tenant's share."""
        pinned = self.pinned_bytes
        new = {key: self.store.size(key) for key in keys if key not in self.chunks}
        size, capacity = sum(new.values()), self.store.capacity_bytes
        if pinned[tenant] + size > self.share * capacity:
            return False
        if pinned.total() + size > max(self.share, PINNED_SHARE) * capacity:
            return False
        for key, one in new.items():
            if self.store.pin(key):
                self.chunks[key] = tenant, one
                pinned[tenant] += one
        return True

    def _forget(self, key: str) -> None:
        """Subtract a chunk that is no longer pinned."""
        tenant, size = self.chunks.pop(key, (None, 0))
        self.pinned_bytes[tenant] -= size
        if not self.pinned_bytes[tenant]:
            del self.pinned_bytes[tenant]
