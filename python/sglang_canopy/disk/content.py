"""A page's bytes: its checksum, optional compression, and how they are cut into units."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import xxhash

from sglang_canopy.errors import CanopyError

Page = Any
"""Something with the buffer protocol, or a sequence of such parts (K and V, or one a layer)."""

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

    def parts(self, page: Page) -> list[memoryview]:
        """The page as flat byte views; together exactly ``page_bytes``."""
        given = page if isinstance(page, (list, tuple)) else (page,)
        views = [memoryview(part).cast("B") for part in given]
        size = sum(len(view) for view in views)
        if size != self.page_bytes:
            raise ValueError(f"a page has {size} bytes, this store's have {self.page_bytes}")
        return views

    def checksum(self, key: bytes, parts: Sequence[memoryview]) -> int:
        """128 bits of XXH3 over the namespace, the key and the content."""
        digest = xxhash.xxh3_128(self._seed + key)
        for part in parts:
            digest.update(part)
        return digest.intdigest()

    def packed(self, parts: list[memoryview]) -> list[memoryview]:
        """What goes to disk for a page: its parts, or fewer bytes."""
        if not self.compress:
            return parts
        data = self._zstd.ZstdCompressor(level=1).compress(b"".join(parts))
        return [memoryview(data)] if len(data) <= self.page_bytes - self.unit_bytes else parts

    def units_for(self, stored_bytes: int) -> int:
        return -(-stored_bytes // self.unit_bytes)

    def pieces(
        self, units: Sequence[int], stored: list[memoryview]
    ) -> list[tuple[int, list[memoryview]]]:
        """Which bytes lie in which unit."""
        if len(units) == 1:
            return [(units[0], stored)]
        flat = list(stored)
        pieces = []
        for unit in units:
            room, mine = self.unit_bytes, []
            while room and flat:
                part = flat[0]
                mine.append(part[:room])
                if len(part) > room:
                    flat[0] = part[room:]
                    room = 0
                else:
                    room -= len(part)
                    flat.pop(0)
            pieces.append((unit, mine))
        return pieces

    def landing(self, stored_bytes: int, into: list[memoryview]) -> list[memoryview]:
        """Where to read a page's stored bytes: the target itself, or a buffer to unpack."""
        if stored_bytes == self.page_bytes:
            return into
        return [memoryview(bytearray(stored_bytes))]

    def unpack(self, landed: list[memoryview], into: list[memoryview]) -> bool:
        """Fill the target from what was read; false where that is no page of ours."""
        if landed is into:
            return True
        try:
            # NOTE: the frame's own word on its size decides how much memory is taken.
            if self._zstd.get_frame_parameters(landed[0]).content_size != self.page_bytes:
                return False
            data = memoryview(self._zstd.ZstdDecompressor().decompress(landed[0]))
        except self._zstd.ZstdError:
            return False
        at = 0
        for part in into:
            part[:] = data[at : at + len(part)]
            at += len(part)
        return at == len(data)
