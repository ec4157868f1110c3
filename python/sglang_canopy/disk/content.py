"""Bytes of a page: flat views of its buffers, and the checksum verified before a page is served."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import xxhash

PageBuffers = Any
"""An object with the buffer protocol, or a sequence of such objects (K and V, or one per layer)."""


def raw_key(key: str) -> bytes:
    """Return 32 bytes for a key: a decoded hex SHA-256, or the SHA-256 of any other text."""
    if len(key) == 64:
        try:
            raw = bytes.fromhex(key)
        except ValueError:
            raw = b""
        if len(raw) == 32 and raw.hex() == key:
            return raw
    return hashlib.sha256(b"text:" + key.encode()).digest()


class Content:
    """Layout and checksums of the pages of one namespace. Thread-safe."""

    def __init__(self, page_bytes: int, namespace: str) -> None:
        self.page_bytes = page_bytes
        self._seed = hashlib.sha256(namespace.encode()).digest()[:16]

    def views(self, page: PageBuffers) -> list[memoryview]:
        """Return the page as flat byte views. Raises ``ValueError`` unless they total ``page_bytes``."""
        buffers = page if isinstance(page, (list, tuple)) else (page,)
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        size_bytes = sum(len(view) for view in views)
        if size_bytes != self.page_bytes:
            raise ValueError(f"a page has {size_bytes} bytes, this store's have {self.page_bytes}")
        return views

    def checksum(self, key: bytes, views: Sequence[memoryview]) -> int:
        """Return 128 bits of XXH3 over the namespace, the key and the content."""
        digest = xxhash.xxh3_128(self._seed + key)
        for view in views:
            digest.update(view)
        return digest.intdigest()
