"""A document's stored chunks: one for each text it was encoded behind. All are pinned alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from canopy_chunks import TENANT_SHARE
from canopy_chunks.documents import MAX_DOCUMENTS, document_name
from canopy_chunks.store import ChunkStore

PINNED_SHARE = 0.25
"""Share of the store's bytes that all tenants' pins together may hold, or one tenant's if larger."""


@dataclass(slots=True)
class _TenantDocuments:
    """One tenant's documents, least recently stored first: keys in the store by name."""

    versions: dict[str, set[str]] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)


class DocumentVersions:
    """Keys in the store by a document's name (the id that ``/canopy/chunks`` answers with).

    A tenant may pin ``share`` of the store's bytes, and have the versions of ``share`` of
    ``MAX_DOCUMENTS`` documents remembered; the oldest of its own are forgotten first. Nothing here
    depends on a clock, so every rank of a split model pins alike.
    """

    def __init__(
        self,
        store: ChunkStore,
        share: float = TENANT_SHARE,
        earlier: DocumentVersions | None = None,
    ) -> None:
        self.store, self.share = store, share
        self.tenants: dict[str | None, _TenantDocuments] = {}
        self.pinned_chunks: dict[str, tuple[str | None, int]] = {}
        self.names = 0
        for tenant, one in earlier.tenants.items() if earlier is not None else ():
            if one.pinned:  # other weights: the pinned documents will be stored anew
                self.tenants[tenant] = _TenantDocuments(pinned=set(one.pinned))

    def stored(self, key: str, ids: Sequence[int], tenant: str | None) -> None:
        """A chunk was stored: a pinned document's is pinned, as far as its tenant's share goes."""
        name, own = document_name(ids, tenant), self.tenants.setdefault(tenant, _TenantDocuments())
        self.names += name not in own.versions
        versions = own.versions.pop(name, set())
        versions -= {one for one in versions if self.store.where(one) is None}
        own.versions[name] = versions | {key}
        self._forget_oldest(tenant, own)
        if name in own.pinned:
            self._pin([key], tenant)

    def found_stored(self, key: str, ids: Sequence[int], tenant: str | None) -> None:
        """A chunk was found stored, by an earlier run perhaps."""
        own = self.tenants.get(tenant)
        if own is None or key not in own.versions.get(document_name(ids, tenant), ()):
            self.stored(key, ids, tenant)

    def keys(self, name: str, tenant: str | None) -> set[str]:
        """Every version's key."""
        own = self.tenants.get(tenant)
        return set(own.versions.get(name, ())) if own is not None else set()

    def pin(self, name: str, tenant: str | None) -> bool:
        """Pin a document. False where nothing of it is stored, or its tenant's pins are full."""
        keys = [key for key in sorted(self.keys(name, tenant)) if self.store.where(key)]
        if not keys or not self._pin(keys, tenant):
            return False
        self.tenants[tenant].pinned.add(name)
        return True

    def unpin(self, name: str, tenant: str | None) -> bool:
        """Undo :meth:`pin`. False where nothing was pinned."""
        own = self.tenants.get(tenant)
        if own is not None:
            own.pinned.discard(name)
        held = [key for key in self.keys(name, tenant) if key in self.pinned_chunks]
        for key in held:
            del self.pinned_chunks[key]
            if self.store.pins(key):
                self.store.unpin(key)
        return bool(held)

    def delete(self, name: str, tenant: str | None) -> bool:
        """Forget a document in every version. False where nothing was stored."""
        keys = self.keys(name, tenant)
        self.unpin(name, tenant)
        own = self.tenants.get(tenant)
        if own is not None:
            self.names -= own.versions.pop(name, None) is not None
            if not own.versions and not own.pinned:
                del self.tenants[tenant]
        return sum(self.store.delete(key) for key in keys) > 0

    def pinned_bytes(self) -> dict[str | None, int]:
        """Bytes of pinned chunks by tenant."""
        self.pinned_chunks = {k: v for k, v in self.pinned_chunks.items() if self.store.pins(k)}
        found: dict[str | None, int] = {}
        for tenant, size in self.pinned_chunks.values():
            found[tenant] = found.get(tenant, 0) + size
        return found

    def _pin(self, keys: Sequence[str], tenant: str | None) -> bool:
        """Pin all of these stored chunks, or none where that is more than the tenant's share."""
        pinned = self.pinned_bytes()
        new = {key: self.store.size(key) for key in keys if key not in self.pinned_chunks}
        size, capacity = sum(new.values()), self.store.capacity_bytes
        if pinned.get(tenant, 0) + size > self.share * capacity:
            return False
        if sum(pinned.values()) + size > max(self.share, PINNED_SHARE) * capacity:
            return False
        for key, one in new.items():
            if self.store.pin(key):
                self.pinned_chunks[key] = tenant, one
        return True

    def _forget_oldest(self, tenant: str | None, own: _TenantDocuments) -> None:
        """Within a tenant's share, then within the whole: of the tenant that has most."""
        while len(own.versions) > max(1, int(self.share * MAX_DOCUMENTS)) and self._forget(tenant):
            pass
        while self.names > MAX_DOCUMENTS:
            largest = max(self.tenants, key=lambda one: len(self.tenants[one].versions))
            if not self._forget(largest):
                return

    def _forget(self, tenant: str | None) -> bool:
        """Forget the oldest document that is not pinned; what is stored of it stays as it is."""
        own = self.tenants[tenant]
        name = next((one for one in own.versions if one not in own.pinned), None)
        if name is None:
            return False
        del own.versions[name]
        self.names -= 1
        if not own.versions and not own.pinned:
            del self.tenants[tenant]
        return True
