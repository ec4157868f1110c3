"""Speed of the disk store and of SGLang's ``file`` backend.

    PYTHONPATH=test python benchmark/tiers/store.py

Pages in files, through the calls that HiCache's controller makes: for ``file`` its generic way (a flat
copy of each page), for the disk store the way without copies. The backends take turns, five rounds each;
the median counts. Neither waits for the disk, and reads come from the page cache: this compares the
backends and not the disk. Prints a table: run it on a quiet machine.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGES = {
    "4 KiB": {"page_tokens": 4, "layers": 8, "heads": 2, "head_dim": 16},
    "184 KiB": {"page_tokens": 8, "layers": 30, "heads": 3, "head_dim": 64},
    "1.4 MiB": {"page_tokens": 64, "layers": 30, "heads": 3, "head_dim": 64},
}
BATCH, ROUNDS = 64, 5
TEST_BYTES = 256 << 20

Call = Callable[[list[str]], int]
"""Store or read the pages of these keys; return the number of pages."""
Calls = tuple[Call, Call, Callable[[], None]]
"""Write, read, and close the backend."""


def measure(shape: dict[str, int]) -> dict[str, float]:
    """Return the median MB/s of writes and reads of each backend, for one shape of pages."""
    from support.store_pool import host_pool

    pool = host_pool(BATCH, **shape)
    pool.kv_buffer.normal_()
    size = pool.page_size * pool.get_size_per_token()
    count = max(BATCH, min(8192, TEST_BYTES // size)) // BATCH * BATCH
    found: dict[str, list[float]] = {}
    for turn in range(ROUNDS):
        for name in ("file", "canopy") if turn % 2 == 0 else ("canopy", "file"):
            place = Path(tempfile.mkdtemp(prefix="canopy-store-"))
            try:
                write, read, close = (_file if name == "file" else _canopy)(
                    pool, place, 2 * count * size
                )
                for what, seconds in _seconds(write, read, count).items():
                    found.setdefault(f"{name}_{what}", []).append(count * size / seconds / 1e6)
                close()
            finally:
                shutil.rmtree(place)
    return {key: statistics.median(each) for key, each in found.items()}


def _seconds(write: Call, read: Call, count: int) -> dict[str, float]:
    """Return the seconds in which ``count`` pages are written, and read again."""
    keys = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(count)]
    batches = [keys[i : i + BATCH] for i in range(0, count, BATCH)]
    begin = time.perf_counter()
    for batch in batches:
        write(batch)
    written = time.perf_counter()
    for batch in batches:
        assert read(batch) == BATCH
    return {"write": written - begin, "read": time.perf_counter() - written}


def _file(pool: Any, folder: Path, capacity_bytes: int) -> Calls:
    """``--hicache-storage-backend file``, by ``_generic_page_set`` and ``_generic_page_get``."""
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    from support.store_pool import storage_config

    # The option that SGLang reads this from as well, as an environment variable.
    with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(folder)):
        storage = HiCacheFile(storage_config({"max_size": capacity_bytes}))
    storage.register_mem_pool_host(pool)
    size = pool.page_size

    def write(keys: list[str]) -> int:
        storage.batch_set(keys, [pool.get_data_page(i * size) for i in range(len(keys))])
        return len(keys)

    def read(keys: list[str]) -> int:
        pages = storage.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
        found = list(itertools.takewhile(lambda page: page is not None, pages))
        for i, page in enumerate(found):
            pool.set_from_flat_data_page(i * size, page)
        return len(found)

    return write, read, lambda: None


def _canopy(pool: Any, folder: Path, capacity_bytes: int) -> Calls:
    """``--hicache-storage-backend canopy``, with the metadata that Canopy's tree gives it."""
    from sglang_canopy.disk.page import PageMeta
    from sglang_canopy.storage.backend import CanopyStorage
    from sglang_canopy.storage.page_table import PAGES as TABLE
    from support.store_pool import storage_config, token_indices

    TABLE.clear()
    settings = {"path": str(folder), "capacity_bytes": capacity_bytes, "sweep_s": 3600}
    storage = CanopyStorage(storage_config(settings))
    storage.register_mem_pool_host(pool)
    assert storage.store.unavailable is None, storage.store.unavailable
    places = token_indices(pool, list(range(BATCH)))
    last: list[str | None] = [None]

    def write(keys: list[str]) -> int:
        metas = [
            PageMeta(BATCH * i, BATCH, category="chat", conversation="c", hits=1)
            for i in range(len(keys))
        ]
        TABLE.describe(keys, metas, [last[0], *keys[:-1]])
        last[0] = keys[-1]
        return sum(storage.batch_set_v1(keys, places))

    def read(keys: list[str]) -> int:
        found = sum(storage.batch_get_v1(keys, places))
        TABLE.take_read(keys)  # as the tree does when it inserts them
        return found

    return write, read, storage.close


def main() -> None:
    print("| page | | `file`, MB/s | disk store, MB/s | times |\n|---|---|---:|---:|---:|")
    for page, shape in PAGES.items():
        found = measure(shape)
        for what in ("write", "read"):
            theirs, ours = found[f"file_{what}"], found[f"canopy_{what}"]
            print(f"| {page} | {what} | {theirs:,.0f} | {ours:,.0f} | {ours / theirs:.1f} |")


if __name__ == "__main__":
    main()
