"""A process that keeps a disk store busy until it is killed. Prints what was acknowledged.

    cd test && python -m support.crash_writer FOLDER SEED

Prints a line per batch that ``write`` acknowledged: the store's clock, the path, and the number of its
pages on disk. At the same time another writer, readers, uses, sweeps and evictions load the store.
"""

import random
import sys
import threading
from pathlib import Path

from sglang_canopy.disk.page import PageMeta
from sglang_canopy.disk.store import DiskStore
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.ttl.table import TTLTable
from support.disk_pages import PAGE, content, metas, page_key

STORE_PAGES = 400


def open_store(folder: Path) -> DiskStore:
    """The store of this test: 400 pages, LRU, a quota, compression off."""
    return DiskStore(
        folder,
        page_bytes=PAGE,
        capacity_bytes=STORE_PAGES * PAGE,
        policy=make_policy("lru"),
        ttl=TTLTable(residual_ttl_s=3600.0),
        quotas={"t1": 100 * PAGE},
        namespace="crash",
    )


def path_of(rng: random.Random) -> list[str]:
    """A path in a bushy tree of a few thousand pages."""
    steps = [rng.randrange(12), *(rng.randrange(3) for _ in range(rng.randrange(1, 12)))]
    return [page_key(*steps[: i + 1]) for i in range(len(steps))]


def write_for_ever(store: DiskStore, seed: int, out: threading.Lock) -> None:
    rng = random.Random(seed)
    while True:
        keys = path_of(rng)
        # A tenant has its own part of the tree: the salt is part of every key.
        tenant = f"t{int(keys[0], 16) % 3}"
        ok = store.write(
            keys,
            [content(k) for k in keys],
            metas(len(keys), store.clock(), tenant=tenant),
            [None, *keys[:-1]],
        )
        with out:
            sys.stdout.write(" ".join([str(sum(ok)), *keys]) + "\n")
            sys.stdout.flush()


def main() -> None:
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    store, out = open_store(folder), threading.Lock()
    assert store.unavailable is None, store.unavailable
    for i in range(2):
        threading.Thread(target=write_for_ever, args=(store, seed + i, out), daemon=True).start()
    rng = random.Random(seed + 7)
    while True:
        keys = path_of(rng)
        into = [bytearray(PAGE) for _ in keys]
        for key, buffer, good in zip(keys, into, store.read(keys, into), strict=True):
            if good and buffer != content(key):
                sys.stdout.write(f"WRONG {key}\n")
                sys.stdout.flush()
        if rng.random() < 0.2:
            store.touch(keys, PageMeta(last_access=store.clock()))
            store.sweep(limit=16)


if __name__ == "__main__":
    main()
