"""``--hicache-storage-backend canopy``: SGLang's storage interface around ``DiskStore``.

HiCache's controller calls this on its own threads with page hashes and places in the host pool;
pages move between pool and files without a copy, in every layout whose pool tells where its
pages lie. What the tree knows of the pages comes through ``pages.PAGES``. Without a tree of
ours (SGLang's own policies) pages are described by when they were written and read.

Nothing here raises for a fault of the disk: the answer is then "not there" and the KV is
recomputed. SGLang logs every batch that "fails", so ``batch_set_v1`` answers true for pages the
store did not take; what happened is in ``status()``.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
)

from sglang_canopy.disk import DiskStore
from sglang_canopy.disk.folder import other_namespaces, remove_abandoned
from sglang_canopy.disk.page import PageMeta
from sglang_canopy.errors import CanopyError
from sglang_canopy.storage.namespace import namespace_of
from sglang_canopy.storage.page_table import PAGES, PageTable
from sglang_canopy.storage.settings import StorageSettings
from sglang_canopy.storage.weights import WEIGHTS
from sglang_canopy.ttl.table import TTLTable

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

TEND_S = 5.0
"""A folder that could not be had is tried again at least as often, in seconds."""


class CanopyStorage(HiCacheStorage):
    """One rank's disk tier. The store opens once the host pool is known."""

    def __init__(self, storage_config: HiCacheStorageConfig, _kwargs: Any = None) -> None:
        self.config = storage_config
        # NOTE: where all ranks have the same KV (MLA), SGLang lets rank 0 alone write, for ranks
        # that share one store. Ours have one each, and a hit needs the page on every rank; this
        # field is what SGLang's controller asks before it writes.
        storage_config.is_mla_model = False
        self.settings = StorageSettings.from_extra(storage_config.extra_config)
        self.pages: PageTable = PAGES
        """Where the tree notes what its pages are (it does so for a backend that has this)."""
        self.store: DiskStore | None = None
        self._namespace = ""
        self._weights = ""
        """``WEIGHTS.id`` of the store's pages."""
        self._said: set[str] = set()
        self._stop = threading.Event()
        self._sweeper: threading.Thread | None = None
        self._catching_up = threading.Lock()
        self.sweeper_cpu_s = 0.0
        """Processor time the sweeper has taken, in seconds."""

    # ---- SGLang's life cycle ----

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the store for this pool's pages. Raises ``CanopyError`` if that cannot work."""
        super().register_mem_pool_host(mem_pool_host)
        self._layout = _Layout(mem_pool_host)
        self._namespace = namespace_of(self.config, mem_pool_host)
        self._weights = WEIGHTS.id
        self.store = self._new_store()
        if self.store.unavailable is None:
            self._say_opened(self.store)
        else:
            logger.warning(
                "Canopy disk tier: %s. It is tried again every %g s, and the server runs without "
                "it until then.",
                self.store.unavailable,
                self._tick_s(),
            )
        self._sweeper = threading.Thread(target=self._sweep, name="canopy-sweeper", daemon=True)
        self._sweeper.start()

    def _new_store(self, before: DiskStore | None = None) -> DiskStore:
        """A store for the weights of now, going on with what ``before`` learnt and counted."""
        settings = self.settings
        namespace = self._namespace
        if WEIGHTS.id:
            namespace += f"|weights={WEIGHTS.id}"
        return DiskStore(
            settings.path,
            page_bytes=self._layout.page_bytes,
            capacity_bytes=settings.capacity_bytes,
            policy=before.policy if before is not None else settings.make_policy(),
            ttl=before.ttl if before is not None else settings.ttl,
            quotas=settings.quota_bytes,
            pin_bytes=settings.pin_bytes,
            pin_tenant_bytes=settings.pin_tenant_bytes,
            compress=settings.compress,
            namespace=namespace,
            temporary=not WEIGHTS.repeatable,
            counters=before.counters if before is not None else None,
        )

    def _say_opened(self, store: DiskStore) -> None:
        logger.info(
            "Canopy disk tier in %s: %d pages of %d bytes on disk, room for %d, policy %s.",
            self.settings.path,
            len(store),
            self._layout.page_bytes,
            self.settings.capacity_bytes // self._layout.page_bytes,
            self.settings.policy,
        )
        remove_abandoned(store.path.parent)
        self._say_other_models(store)

    @staticmethod
    def _say_other_models(store: DiskStore) -> None:
        for folder, size in other_namespaces(store.path.parent, store.path).items():
            if size:
                logger.info(
                    "%s holds %.1f GB of another model, layout or rank, which count in no budget "
                    "of this one; remove it if no server needs it (file 'namespace' says whose).",
                    folder,
                    size / 1e9,
                )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV:
            raise CanopyError(
                f"--hicache-storage-backend canopy keeps plain KV only, and this model has a pool "
                f"{str(host_pool_name)!r} as well; use --hicache-storage-backend file"
            )

    def close(self) -> None:
        self._stop.set()
        if self._sweeper is not None:
            self._sweeper.join(timeout=10)
        if self.store is not None:
            self._catch_up()
            self.store.close()

    def clear(self) -> None:
        """Remove every page of this model from the disk."""
        if self.store is not None:
            self._guarded(self.store.clear, None)
            self.pages.refused()

    # ---- pages ----

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        if self._outdated():
            return 0
        return self._guarded(lambda: self._open_store().leading(keys), 0)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Write pages of the host pool. True whatever became of them, see the module."""
        views = self._layout.views(host_indices, len(keys))
        self._guarded(lambda: self._write(keys, views, extra_info), None)
        return [True] * len(keys)

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Read pages into the host pool, up to the first that is not there."""
        views = self._layout.views(host_indices, len(keys))
        return self._guarded(lambda: self._read(keys, views), [False] * len(keys))

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        found = self.batch_get([key], [target_location])
        return found[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """As ``batch_get_v1``, into flat tensors of one page each."""
        views = [[_bytes_of(tensor)] for tensor in target_locations]
        ok = self._guarded(lambda: self._read(keys, views), [False] * len(keys))
        return [tensor if good else None for tensor, good in zip(target_locations, ok)]

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """As ``batch_set_v1``, from flat tensors of one page each."""
        views = [[_bytes_of(value.contiguous())] for value in values]
        self._guarded(lambda: self._write(keys, views, None), None)
        return True

    # ---- what Canopy's own parts ask ----

    def set_ttl(self, table: TTLTable) -> None:
        """New TTLs, on any thread."""
        if self.store is not None:
            self._guarded(lambda: self._open_store().set_ttl(table), None)

    def status(self) -> dict[str, Any]:
        """The disk tier for ``/canopy/status``: pages and bytes since the start, and its TTLs."""
        store = self._open_store()
        stats = store.stats()
        return {
            "unavailable": self._unavailable(store),
            "capacity_bytes": stats["capacity_bytes"],
            "used_bytes": stats["bytes"],
            "pages": stats["pages"],
            "policy": self.settings.policy,
            "pinned_bytes": stats["pinned_bytes"],
            "pin_limit_bytes": stats["pin_bytes"],
            "pin_tenant_limit_bytes": stats["pin_tenant_bytes"],
            "pins_refused": stats["pins_refused"],
            "pinned_tenants": stats["pinned_tenants"],
            "written_pages": stats["written"],
            "written_bytes": stats["written_bytes"],
            "read_pages": stats["read"],
            "read_bytes": stats["read_bytes"],
            "refused_pages": stats["refused"],
            "evicted_pages": stats["evicted"],
            "residency_pages": stats["residency_s"],
            "residency_page_seconds": stats["page_seconds"],
            "hit_pages": stats["hits"],
            "faults": stats["faults"],
            "sweeper_cpu_s": self.sweeper_cpu_s,
        }

    # ---- work ----

    def _open_store(self) -> DiskStore:
        assert self.store is not None, "no host pool was registered"
        return self.store

    def _write(
        self,
        keys: Sequence[str],
        views: Sequence[Sequence[memoryview]],
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> None:
        if self._outdated():
            return
        self._guarded(self._catch_up, None)
        prefix = (extra_info.prefix_keys if extra_info is not None else None) or [None]
        first = self.pages.parent(keys[0], default=prefix[-1])
        metas = [self.pages.of(key) for key in keys]
        if None in metas:
            metas = self._described(metas, first)
        stored = self._open_store().write(keys, views, metas, [first, *keys[:-1]])
        self.pages.written(keys)
        if not all(stored):
            self.pages.refused()

    def _read(self, keys: Sequence[str], views: Sequence[Sequence[memoryview]]) -> list[bool]:
        if self._outdated():
            return [False] * len(keys)
        store = self._open_store()
        metas = store.meta(keys)  # before the read, which is a use
        ok = store.read(keys, views)
        found = [(k, m) for k, m in zip(keys[: sum(ok)], metas) if m is not None]
        self.pages.returned([k for k, _ in found], [m for _, m in found])
        return ok

    def _described(self, metas: list[PageMeta | None], parent: str | None) -> list[PageMeta]:
        """What can be said of pages without the tree's word: where they lie, and that it is now."""
        store = self._open_store()
        now = store.clock() + getattr(store.clock, "skew_s", 0.0)
        above = store.meta([parent])[0] if parent is not None else None
        offset = above.offset + above.tokens if above is not None else 0
        tokens, described = self._layout.page_tokens, []
        for meta in metas:
            if meta is None:
                meta = PageMeta(offset, tokens, created=now, last_access=now, hits=1)
            described.append(meta)
            offset = meta.offset + meta.tokens
        return described

    def _outdated(self) -> bool:
        """Whether the store's pages are of other weights than the KV in memory may be."""
        return WEIGHTS.resting() is not None or WEIGHTS.id != self._weights

    def _unavailable(self, store: DiskStore) -> str | None:
        """For an operator: why nothing is found or kept now, and what will end that."""
        resting = WEIGHTS.resting()
        if resting is not None:
            return resting
        if self._outdated():
            return "the weights were updated; the disk tier is about to start again"
        if store.unavailable in (None, "closed"):
            return store.unavailable
        return f"{store.unavailable} (tried again every {self._tick_s():g} s)"

    def _tick_s(self) -> float:
        return min(self.settings.sweep_s, TEND_S)

    def _tend(self) -> None:
        """Start anew after an update of the weights; try again for a folder that was not free."""
        store = self._open_store()
        if self._outdated():
            if WEIGHTS.resting() is None:
                self._follow_weights(store)
        elif store.unavailable not in (None, "closed") and store.open():
            logger.info("Canopy disk tier: available now.")
            self._say_opened(store)

    def _follow_weights(self, before: DiskStore) -> None:
        """Pages of the weights before are of no use to anyone: their room is the next ones'."""
        weights = WEIGHTS.id
        before.discard()
        after = self._new_store(before)
        logger.info("Canopy disk tier: the weights were updated, so it starts without pages.")
        self.store = after
        self._weights = weights  # last: from here on the store is used

    def _sweep(self) -> None:
        """The sweeper's thread: uses and requests are passed on, expired pages go."""
        tick, passed = self._tick_s(), 0.0
        while not self._stop.wait(tick):
            begin = time.thread_time()
            self._guarded(self._tend, None)
            passed += tick
            if passed >= self.settings.sweep_s:
                passed = 0.0
                self._guarded(self._catch_up, None)
                self._guarded(lambda: self._open_store().sweep(), 0)
            self.sweeper_cpu_s += time.thread_time() - begin

    def _catch_up(self) -> None:
        """Pass on what the tree said since the last time."""
        if not self._catching_up.acquire(blocking=False):
            return  # another thread is at it
        try:
            store = self._open_store()
            for event, request in self.pages.announced():
                if event == "arrive":
                    request.label = None
                    store.arrive(request)
                else:
                    store.finish(request)
            for keys, meta in self.pages.uses():
                store.touch(keys, meta)
        finally:
            self._catching_up.release()

    def _guarded(self, work: Callable[[], _T], otherwise: _T) -> _T:
        """What must never reach SGLang's threads: an error of ours, logged once a kind."""
        try:
            return work()
        except Exception as error:
            if self.store is not None:
                self.store.counters.faults["internal"] += 1
            kind = f"{type(error).__name__} {error}"[:200]
            if kind not in self._said and len(self._said) < 100:
                self._said.add(kind)
                logger.exception("Canopy disk tier: recomputing instead; said once")
            return otherwise


class _Layout:
    """Where a host pool's pages lie."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.page_tokens: int = pool.page_size
        try:
            _, sizes = pool.get_page_buffer_meta(torch.arange(pool.page_size))
        except (AttributeError, NotImplementedError, ValueError) as error:
            raise CanopyError(
                f"--hicache-storage-backend canopy cannot use the host layout "
                f"{getattr(pool, 'layout', '?')!r} of {type(pool).__name__} ({error}); try "
                "--hicache-mem-layout page_first or page_first_direct"
            ) from None
        self.page_bytes = sum(sizes)
        self._types = {size: ctypes.c_char * size for size in set(sizes)}
        self._parts = len(sizes)

    def views(self, host_indices: torch.Tensor, pages: int) -> list[list[memoryview]]:
        """The pages' memory, writable, as the pool's own buffers (K and V, or one a layer)."""
        pointers, sizes = self.pool.get_page_buffer_meta(host_indices)
        assert len(pointers) == pages * self._parts, (len(pointers), pages, self._parts)
        types = self._types
        flat = [
            memoryview(types[size].from_address(pointer)).cast("B")
            for pointer, size in zip(pointers, sizes)
        ]
        return [flat[i : i + self._parts] for i in range(0, len(flat), self._parts)]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy().reshape(-1)).cast("B")
