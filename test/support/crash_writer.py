"""A process that keeps a disk store busy until it is killed. Prints what was acknowledged.

    cd test && python -m support.crash_writer FOLDER SEED

Prints a line for each batch that ``write`` acknowledged: the number of its pages on disk, then their keys.
Two threads write; the main thread reads, uses and sweeps, so that pages are evicted meanwhile.
"""

import random
import sys
import threading
from pathlib import Path

from sglang_canopy.disk.page import PageMeta
from sglang_canopy.disk.store import DiskStore
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.ttl.table import TTLTable
from support.disk_pages import PAGE_BYTES, content, key_of, page_metas

STORE_PAGES = 400


def open_store(folder: Path) -> DiskStore:
    """The store of this test: 400 pages, LRU, a quota, compression off."""
    return DiskStore(
        folder,
        page_bytes=PAGE_BYTES,
        capacity_bytes=STORE_PAGES * PAGE_BYTES,
        policy=make_policy("lru"),
        ttl=TTLTable(residual_ttl_s=3600.0),
        quotas={"t1": 100 * PAGE_BYTES},
        namespace="crash",
    )


def random_path(rng: random.Random) -> list[str]:
    """Return the keys of a path in a bushy tree of a few thousand pages."""
    branches = [rng.randrange(12), *(rng.randrange(3) for _ in range(rng.randrange(1, 12)))]
    return [key_of(*branches[: i + 1]) for i in range(len(branches))]


def write_forever(store: DiskStore, seed: int, lock: threading.Lock) -> None:
    rng = random.Random(seed)
    while True:
        keys = random_path(rng)
        # A tenant has its own part of the tree: the salt is part of every key.
        tenant = f"t{int(keys[0], 16) % 3}"
        stored = store.write(
            keys,
            [content(key) for key in keys],
            page_metas(len(keys), store.clock(), tenant=tenant),
            [None, *keys[:-1]],
        )
        with lock:
            sys.stdout.write(" ".join([str(sum(stored)), *keys]) + "\n")
            sys.stdout.flush()


def main() -> None:
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    store, lock = open_store(folder), threading.Lock()
    assert store.unavailable is None, store.unavailable
    for i in range(2):
        threading.Thread(target=write_forever, args=(store, seed + i, lock), daemon=True).start()
    rng = random.Random(seed + 7)
    while True:
        keys = random_path(rng)
        buffers = [bytearray(PAGE_BYTES) for _ in keys]
        for key, buffer, readable in zip(keys, buffers, store.read(keys, buffers), strict=True):
            if readable and buffer != content(key):
                sys.stdout.write(f"WRONG {key}\n")
                sys.stdout.flush()
        if rng.random() < 0.2:
            store.touch(keys, PageMeta(last_access=store.clock()))
            store.sweep(max_pages=16)


if __name__ == "__main__":
    main()
