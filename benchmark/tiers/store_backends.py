"""SGLang's ``file`` backend and ours behind one face: the calls HiCache's controller makes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE, HiCacheFile

from sglang_canopy.disk.page import PageMeta
from sglang_canopy.records import Request
from sglang_canopy.storage.backend import CanopyStorage
from sglang_canopy.storage.host_layout import HostLayout
from sglang_canopy.storage.page_table import PAGES
from support.store_pool import storage_config, token_indices

logging.getLogger("sglang.srt.mem_cache").setLevel(logging.ERROR)


class Backend:
    """A storage backend and the host pool it reads into. Pages are pool places 0, 1, ..."""

    name: str

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.layout = HostLayout(pool)
        self.batch = min(STORAGE_BATCH_SIZE, pool.page_num)
        self.indices = token_indices(pool, list(range(self.batch)))
        self.views = self.layout.views(self.indices, self.batch)

    def stamp(self, place: int, key: str) -> None:
        """Write ``key`` into the page at ``place`` (its first and last bytes)."""
        mark = bytes.fromhex(key)[:16]
        self.views[place][0][:16] = mark
        self.views[place][-1][-16:] = mark

    def is_page(self, place: int, key: str) -> bool:
        mark = bytes.fromhex(key)[:16]
        view = self.views[place]
        return view[0][:16] == mark and view[-1][-16:] == mark

    def at(self, pages: int) -> torch.Tensor:
        return self.indices[: pages * self.pool.page_size]

    def exists(self, keys: list[str]) -> int:
        return self.storage.batch_exists(keys)

    def get(self, keys: list[str]) -> int:
        """Pages read into places 0, 1, ... of the pool."""
        raise NotImplementedError

    def set(self, keys: list[str]) -> None:
        """Write the pages at places 0, 1, ..."""
        raise NotImplementedError

    def say(self, event: str, request: Request) -> None:
        """Pass an event on, as a tree with our policies does."""

    def note(self, keys: Sequence[str], metas: Sequence[PageMeta], parent: str | None) -> None:
        pass

    def used(self, keys: Sequence[str], meta: PageMeta) -> None:
        pass

    def at_time(self, now: float) -> None:
        pass

    def close(self) -> None:
        pass


class FileBackend(Backend):
    """``--hicache-storage-backend file`` with its evictor, through the controller's generic path
    (``_generic_page_set`` and ``_generic_page_get``: a flat copy of each page)."""

    name = "file"

    def __init__(self, pool: Any, folder: Path, capacity_bytes: int) -> None:
        super().__init__(pool)
        # The option that SGLang reads this from as well, as an environment variable.
        with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(folder)):
            self.storage = HiCacheFile(storage_config({"max_size": capacity_bytes}))
        self.storage.register_mem_pool_host(pool)

    def get(self, keys: list[str]) -> int:
        pool, size = self.pool, self.pool.page_size
        into = [pool.get_dummy_flat_data_page() for _ in keys]
        found = self.storage.batch_get(keys, into)
        for i, page in enumerate(found):
            if page is None:
                return i
            pool.set_from_flat_data_page(i * size, page)
        return len(keys)

    def set(self, keys: list[str]) -> None:
        size = self.pool.page_size
        self.storage.batch_set(keys, [self.pool.get_data_page(i * size) for i in range(len(keys))])


class CanopyBackend(Backend):
    """``--hicache-storage-backend canopy``, with the metadata of Canopy's tree."""

    name = "canopy"

    def __init__(
        self, pool: Any, folder: Path, capacity_bytes: int, policy: str = "canopy-lru", **extra: Any
    ) -> None:
        super().__init__(pool)
        PAGES.clear()
        settings = {"path": str(folder), "capacity_bytes": capacity_bytes, "policy": policy}
        self.storage = CanopyStorage(storage_config({**settings, "sweep_s": 3600, **extra}))
        self.storage.register_mem_pool_host(pool)
        assert self.storage.store.unavailable is None, self.storage.store.unavailable
        self.name = f"canopy {policy}"
        self._now = 0.0

    def get(self, keys: list[str]) -> int:
        got = sum(self.storage.batch_get_v1(keys, self.at(len(keys))))
        PAGES.take_read(keys)  # as the tree does when it inserts them
        return got

    def set(self, keys: list[str]) -> None:
        self.storage.batch_set_v1(keys, self.at(len(keys)))

    def say(self, event: str, request: Request) -> None:
        PAGES.add_request(event, request)

    def note(self, keys: Sequence[str], metas: Sequence[PageMeta], parent: str | None) -> None:
        PAGES.describe(keys, metas, [parent, *keys[:-1]])

    def used(self, keys: Sequence[str], meta: PageMeta) -> None:
        PAGES.add_use(keys, meta)

    def at_time(self, now: float) -> None:
        if self.storage.store.clock is not self._clock:
            self.storage.store.state.clock = self._clock
        self._now = now

    def _clock(self) -> float:
        return self._now

    def close(self) -> None:
        self.storage.close()
