"""The queue of chunks to encode: bounded, and shared fairly between tenants.

Tenants take turns, so that one who brings a thousand documents does not keep another's waiting. A
queue that is full takes from the tenant who has most in it; who has most himself is turned away.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

MAX_WAITING_TOKENS = 1 << 20
MAX_WAITING_CHUNKS = 1 << 12
"""What may wait to be encoded; what comes on top is forgotten until it comes again."""


class Wanted(NamedTuple):
    """A chunk to encode: its tokens, what to encode it behind, the salt of its address, its tenant,
    and the name of the document that it is."""

    ids: tuple[int, ...]
    prefix: tuple[int, ...]
    salt: str
    tenant: str | None
    name: str


@dataclass(slots=True)
class _Line:
    """One tenant's chunks, oldest first, and their tokens."""

    chunks: OrderedDict[str, Wanted]
    tokens: int = 0


class Waiting:
    """Chunks by key. Every rank of a split model sees the same calls, and gives the same answers."""

    def __init__(self) -> None:
        self.lines: OrderedDict[str | None, _Line] = OrderedDict()
        self.chunks = self.tokens = self.forgotten = 0

    def __len__(self) -> int:
        return self.chunks

    def add(self, key: str, wanted: Wanted) -> None:
        """Put a chunk at the end of its tenant's line; once it waits, again is nothing."""
        if (key, wanted.tenant) in self:
            return
        if not self._make_room(wanted):
            self.forgotten += 1
            return
        own = self.lines.setdefault(wanted.tenant, _Line(OrderedDict()))
        own.chunks[key] = wanted
        self._count(own, 1, len(wanted.ids))

    def next(self) -> tuple[str, Wanted] | None:
        """The oldest chunk of the tenant whose turn it is, taken out."""
        if not self.lines:
            return None
        tenant, line = next(iter(self.lines.items()))
        self.lines.move_to_end(tenant)
        return self._take(tenant, next(iter(line.chunks)))

    def remove(self, name: str, tenant: str | None) -> None:
        """Take a document's chunks out, if any wait."""
        line = self.lines.get(tenant)
        found = line.chunks.items() if line is not None else ()
        for key in [key for key, wanted in found if wanted.name == name]:
            self._take(tenant, key)

    def __contains__(self, asked: tuple[str, str | None]) -> bool:
        """Whether a tenant's chunk ``(key, tenant)`` waits."""
        key, tenant = asked
        return tenant in self.lines and key in self.lines[tenant].chunks

    def _make_room(self, wanted: Wanted) -> bool:
        tokens = len(wanted.ids)
        if tokens > MAX_WAITING_TOKENS:
            return False
        while self.chunks >= MAX_WAITING_CHUNKS or self.tokens + tokens > MAX_WAITING_TOKENS:
            by_chunks = self.chunks >= MAX_WAITING_CHUNKS
            largest = max(self.lines, key=lambda tenant: self._held(tenant, by_chunks))
            own = self._held(wanted.tenant, by_chunks) + (1 if by_chunks else tokens)
            if largest == wanted.tenant or self._held(largest, by_chunks) < own:
                return False
            self._take(largest, next(reversed(self.lines[largest].chunks)))
            self.forgotten += 1
        return True

    def _held(self, tenant: str | None, by_chunks: bool) -> int:
        line = self.lines.get(tenant)
        if line is None:
            return 0
        return len(line.chunks) if by_chunks else line.tokens

    def _take(self, tenant: str | None, key: str) -> tuple[str, Wanted]:
        line = self.lines[tenant]
        wanted = line.chunks.pop(key)
        self._count(line, -1, -len(wanted.ids))
        if not line.chunks:
            del self.lines[tenant]
        return key, wanted

    def _count(self, line: _Line, chunks: int, tokens: int) -> None:
        line.tokens += tokens
        self.chunks += chunks
        self.tokens += tokens
