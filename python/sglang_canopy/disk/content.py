"""A page's bytes: its checksum, optional compression, and how they are cut into units."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import xxhash

from sglang_canopy.errors import CanopyError

PageBuffers = Any
"""Something with the buffer protocol, or a sequence of such buffers (K and V, or one a layer)."""

COMPRESSED_UNITS = 16
"""Units a page where pages are compressed: savings come in sixteenths."""


def raw_key(key: str) -> bytes:
    """32 bytes for a key: those of a SHA-256 written as hex, or the SHA-256 of anything else."""
    if len(key) == 64:
        try:
            raw = bytes.fromhex(key)
        except ValueError:
            raw = b""
        if len(raw) == 32 and raw.hex() == key:
            return raw
    return hashlib.sha256(b"text:" + key.encode()).digest()


class Content:
    """Turns pages into what is stored and back. Thread-safe."""

    def __init__(self, page_bytes: int, *, compress: bool, namespace: str) -> None:
        self.page_bytes = page_bytes
        self.compress = compress
        self.unit_bytes = -(-page_bytes // COMPRESSED_UNITS) if compress else page_bytes
        self._seed = hashlib.sha256(namespace.encode()).digest()[:16]
        if compress:
            try:
                import zstandard
            except ImportError:
                raise CanopyError(
                    "disk store: compress needs the package zstandard; install it or turn "
                    "compress off"
                ) from None
            self._zstd = zstandard

    def views(self, page: PageBuffers) -> list[memoryview]:
        """The page as flat byte views; together exactly ``page_bytes``."""
        given = page if isinstance(page, (list, tuple)) else (page,)
        views = [memoryview(buffer).cast("B") for buffer in given]
        size = sum(len(view) for view in views)
        if size != self.page_bytes:
            raise ValueError(f"a page has {size} bytes, this store's have {self.page_bytes}")
        return views

    def checksum(self, key: bytes, views: Sequence[memoryview]) -> int:
        """128 bits of XXH3 over the namespace, the key and the content."""
        digest = xxhash.xxh3_128(self._seed + key)
        for view in views:
            digest.update(view)
        return digest.intdigest()

    def encode(self, views: list[memoryview]) -> list[memoryview]:
        """What goes to disk for a page: its bytes, compressed where that saves a unit."""
        if not self.compress:
            return views
        data = self._zstd.ZstdCompressor(level=1).compress(b"".join(views))
        return [memoryview(data)] if len(data) <= self.page_bytes - self.unit_bytes else views

    def units_for(self, stored_bytes: int) -> int:
        return -(-stored_bytes // self.unit_bytes)

    def extents(
        self, units: Sequence[int], stored: list[memoryview]
    ) -> list[tuple[int, list[memoryview]]]:
        """Which bytes lie in which unit."""
        if len(units) == 1:
            return [(units[0], stored)]
        left = list(stored)
        extents = []
        for unit in units:
            room, in_unit = self.unit_bytes, []
            while room and left:
                view = left[0]
                in_unit.append(view[:room])
                if len(view) > room:
                    left[0] = view[room:]
                    room = 0
                else:
                    room -= len(view)
                    left.pop(0)
            extents.append((unit, in_unit))
        return extents

    def read_buffers(self, stored_bytes: int, into: list[memoryview]) -> list[memoryview]:
        """Where to read a page's stored bytes: the target itself, or a buffer to unpack."""
        if stored_bytes == self.page_bytes:
            return into
        return [memoryview(bytearray(stored_bytes))]

    def decode(self, stored: list[memoryview], into: list[memoryview]) -> bool:
        """Fill the target from what was read; false where that is no valid page."""
        if stored is into:
            return True
        try:
            # NOTE: the size in the frame's header decides how much memory is taken.
            if self._zstd.get_frame_parameters(stored[0]).content_size != self.page_bytes:
                return False
            data = memoryview(self._zstd.ZstdDecompressor().decompress(stored[0]))
        except self._zstd.ZstdError:
            return False
        at = 0
        for view in into:
            view[:] = data[at : at + len(view)]
            at += len(view)
        return at == len(data)
