"""Pages whose content is a function of their key, and a store to put them in."""

import hashlib
from pathlib import Path
from typing import Any

from sglang_canopy.disk.page import PageMeta
from sglang_canopy.disk.store import DiskStore
from sglang_canopy.policy.registry import make_policy

PAGE_BYTES = 512
PAGE_TOKENS = 16


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def key_of(*path: object) -> str:
    """The key of the page at the end of ``path``: equal path, equal key."""
    return hashlib.sha256(repr(path).encode()).hexdigest()


def content(key: str, byte_count: int = PAGE_BYTES) -> bytes:
    """Return the page's bytes, as recomputation would give them."""
    return hashlib.shake_128(key.encode()).digest(byte_count)


def store_at(folder: Path, pages: int = 8, **options: Any) -> DiskStore:
    """Return a store of ``pages`` pages of 512 bytes, by default with LRU and a settable clock."""
    settings = {
        "page_bytes": PAGE_BYTES,
        "capacity_bytes": pages * PAGE_BYTES,
        "policy": make_policy("lru"),
        "clock": Clock(),
        "namespace": "test",
    }
    return DiskStore(folder, **{**settings, **options})


def chain(name: object, length: int) -> list[str]:
    """Keys of a path of ``length`` pages."""
    return [key_of(name, *range(i + 1)) for i in range(length)]


def page_metas(count: int, now: float, **fields: Any) -> list[PageMeta]:
    """Metadata of the first ``count`` pages of a path, created and used at ``now``."""
    return [
        PageMeta(
            offset=i * PAGE_TOKENS,
            length=PAGE_TOKENS,
            **{"created": now, "last_access": now, "hits": 1, **fields},
        )
        for i in range(count)
    ]


def put(store: DiskStore, keys: list[str], parent: str | None = None, **fields: Any) -> list[bool]:
    """Write a run of pages below ``parent``, used now."""
    parents = [parent, *keys[:-1]]
    metas = page_metas(len(keys), store.clock(), **fields)
    return store.write(keys, [content(key) for key in keys], metas, parents)


def get(store: DiskStore, keys: list[str]) -> list[bool]:
    """Read a run of pages; check the bytes of every page that is readable."""
    buffers = [bytearray(PAGE_BYTES) for _ in keys]
    readable_pages = store.read(keys, buffers)
    for key, buffer, readable in zip(keys, buffers, readable_pages, strict=True):
        assert not readable or buffer == content(key), f"wrong bytes for {key}"
    return readable_pages
