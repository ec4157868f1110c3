"""``--hicache-storage-backend canopy``: SGLang's storage interface around ``DiskStore``.

HiCache's controller calls this on its own threads with page hashes and slots of the host pool. Pages
move between pool and files without a copy (``HostLayout``). The tree passes metadata of pages through
``page_table.PAGES`` (``current_store``). With SGLang's own policies, metadata is limited to the times of
writes and reads.

Disk faults raise no exception: pages count as absent, and the KV is recomputed. SGLang logs every
batch that "fails", so ``batch_set_v1`` returns true for refused pages too; ``status()`` counts them.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
)

from sglang_canopy.disk.store import DiskStore
from sglang_canopy.errors import CanopyError
from sglang_canopy.radix.overrides import check_overrides
from sglang_canopy.storage import weights
from sglang_canopy.storage.current_store import CurrentStore
from sglang_canopy.storage.namespace import are_weights_local, rank_namespace
from sglang_canopy.storage.page_table import PAGES, PageTable
from sglang_canopy.storage.settings import StorageSettings


class HostLayout:
    """Writable memory of a host pool's pages, for every layout whose pool returns addresses."""

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
        self._type_by_size = {size: ctypes.c_char * size for size in set(sizes)}
        self._page_buffers = len(sizes)
        """Buffers of one page: K and V, or one per layer."""

    def page_views(self, host_indices: torch.Tensor, page_count: int) -> list[list[memoryview]]:
        """Return the buffers of each page as writable views of the pool's memory."""
        pointers, sizes = self.pool.get_page_buffer_meta(host_indices)
        assert len(pointers) == page_count * self._page_buffers, (len(pointers), page_count)
        views = [
            memoryview(self._type_by_size[size].from_address(pointer)).cast("B")
            for pointer, size in zip(pointers, sizes)
        ]
        return [views[i : i + self._page_buffers] for i in range(0, len(views), self._page_buffers)]


class Sweeper:
    """A thread that calls ``maintain`` every ``interval_s`` seconds and ``sweep`` every
    ``sweep_s`` seconds."""

    def __init__(
        self,
        maintain: Callable[[], None],
        sweep: Callable[[], None],
        interval_s: float,
        sweep_s: float,
    ) -> None:
        self.maintain, self.sweep = maintain, sweep
        self.interval_s, self.sweep_s = interval_s, sweep_s
        self._stopping = threading.Event()
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; possible again after ``stop``."""
        self._stopping.clear()
        self.thread = threading.Thread(target=self._run, name="canopy-sweeper", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end, at most 10 s."""
        self._stopping.set()
        if self.thread is not None:
            self.thread.join(timeout=10)

    def _run(self) -> None:
        since_sweep_s = 0.0
        while not self._stopping.wait(self.interval_s):
            self.maintain()
            since_sweep_s += self.interval_s
            if since_sweep_s >= self.sweep_s:
                since_sweep_s = 0.0
                self.sweep()


logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class CanopyStorage(HiCacheStorage):
    """Disk tier of one rank. The store opens when the host pool is registered."""

    def __init__(self, storage_config: HiCacheStorageConfig, _kwargs: Any = None) -> None:
        check_overrides(CanopyStorage)
        self.config = storage_config
        # NOTE: with MLA all ranks have the same KV, and SGLang lets only rank 0 write to a shared
        # store. Our ranks have separate stores, and a hit needs the page on every rank.
        # HiCacheStorageConfig.is_storage_writer (hicache_storage.py) reads this field.
        storage_config.is_mla_model = False
        self.settings = StorageSettings.from_extra(storage_config.extra_config)
        self.pages: PageTable = PAGES
        """Page table of the tree, which describes pages for backends with this attribute."""
        self.current: CurrentStore | None = None
        self.sweeper: Sweeper | None = None
        self._logged_kinds: set[str] = set()

    @property
    def store(self) -> DiskStore | None:
        """The current store; ``None`` until the host pool is registered."""
        return None if self.current is None else self.current.store

    # ---- SGLang's life cycle ----

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the store for this pool's pages. Raises ``CanopyError`` for unsupported pools."""
        super().register_mem_pool_host(mem_pool_host)
        self.layout = HostLayout(mem_pool_host)
        namespace = rank_namespace(self.config, mem_pool_host)
        if not are_weights_local():
            weights.WEIGHTS.record_remote_load()
        layout = self.layout
        self.current = current = CurrentStore(
            self.settings, namespace, layout.page_bytes, layout.page_tokens, self.pages
        )
        self.sweeper = Sweeper(self.maintain, self.sweep, current.interval_s, self.settings.sweep_s)
        self.sweeper.start()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV:
            raise CanopyError(
                f"--hicache-storage-backend canopy keeps plain KV only, and this model has a pool "
                f"{str(host_pool_name)!r} as well; use --hicache-storage-backend file"
            )

    def close(self) -> None:
        if self.sweeper is not None:
            self.sweeper.stop()
        if self.current is not None:
            self.current.deliver_reports()
            self.current.store.close()

    def clear(self) -> None:
        """Remove every page of this model from the disk."""
        if self.current is not None:
            self._run_guarded(self.current.store.clear, None)
            self.pages.add_refusal()

    # ---- pages ----

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        def count_leading() -> int:
            current = self._registered_store()
            return 0 if current.is_outdated else current.store.count_leading(keys)

        return self._run_guarded(count_leading, 0)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Write pages of the host pool. Always returns true; see the module."""
        views = self.layout.page_views(host_indices, len(keys))
        prefix_keys = extra_info.prefix_keys if extra_info is not None else None
        prefix_key = prefix_keys[-1] if prefix_keys else None
        self._run_guarded(lambda: self._registered_store().deliver_reports(), None)
        self._run_guarded(lambda: self._registered_store().write(keys, views, prefix_key), None)
        return [True] * len(keys)

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Read pages into the host pool, up to the first missing page."""
        views = self.layout.page_views(host_indices, len(keys))
        return self._run_guarded(
            lambda: self._registered_store().read(keys, views), [False] * len(keys)
        )

    def _refuse_single_pages(self, *_: Any, **__: Any) -> Any:
        """Stand for SGLang's deprecated calls, page by page, which it does not make to a backend with
        ``interface_v1`` (``HiCacheController.attach_storage_backend``, cache_controller.py)."""
        raise NotImplementedError("pages are passed by batch_get_v1 and batch_set_v1")

    get = batch_get = set = batch_set = _refuse_single_pages

    # ---- for Canopy's own parts ----

    def status(self) -> dict[str, Any]:
        """Return the disk tier's part of ``/canopy/status``: pages and bytes since the start."""
        return self._registered_store().status()

    def count_pages(self) -> dict[str, dict[Any, int]]:
        """Return pages on disk by ``categories``, ``tenants`` and ``groups`` of the TTL table."""
        return self._registered_store().store.count_pages()

    # ---- regular work ----

    def maintain(self) -> None:
        """Replace the store after an update of the weights; retry an unavailable folder."""
        self._run_guarded(self._registered_store().maintain, None)

    def sweep(self) -> None:
        """Deliver uses and requests to the store, and remove expired pages."""
        self._run_guarded(self._registered_store().deliver_reports, None)
        self._run_guarded(lambda: self._registered_store().store.sweep(), 0)

    # ---- helpers ----

    def _registered_store(self) -> CurrentStore:
        assert self.current is not None, "no host pool was registered"
        return self.current

    def _run_guarded(self, work: Callable[[], _T], default: _T) -> _T:
        """Return ``work()``, or ``default`` after an error, which is logged once per kind. Errors of
        Canopy must not reach SGLang's threads."""
        try:
            return work()
        except Exception as error:
            if self.current is not None:
                self.current.store.counters.faults["internal"] += 1
            kind = f"{type(error).__name__} {error}"[:200]
            if kind not in self._logged_kinds and len(self._logged_kinds) < 100:
                self._logged_kinds.add(kind)
                logger.exception("Canopy disk tier: recomputing instead; logged once")
            return default
