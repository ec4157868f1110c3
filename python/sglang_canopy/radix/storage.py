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
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
)

from sglang_canopy.errors import CanopyError
from sglang_canopy.radix.pages import PAGES, PageTable
from sglang_canopy.radix.storage_settings import StorageSettings
from sglang_canopy.tier.disk import DiskStore
from sglang_canopy.tier.disk.folder import other_namespaces
from sglang_canopy.tier.page import PageMeta
from sglang_canopy.tier.ttl import TTLTable

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class CanopyStorage(HiCacheStorage):
    """One rank's disk tier. The store opens once the host pool is known."""

    def __init__(self, storage_config: HiCacheStorageConfig, _kwargs: Any = None) -> None:
        self.config = storage_config
        self.settings = StorageSettings.from_extra(storage_config.extra_config)
        self.pages: PageTable = PAGES
        """Where the tree notes what its pages are (it does so for a backend that has this)."""
        self.store: DiskStore | None = None
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
        settings = self.settings
        self.store = DiskStore(
            settings.path,
            page_bytes=self._layout.page_bytes,
            capacity_bytes=settings.capacity_bytes,
            policy=settings.make_policy(),
            ttl=settings.ttl,
            quotas=settings.quota_bytes,
            pin_bytes=settings.pin_bytes,
            pin_tenant_bytes=settings.pin_tenant_bytes,
            compress=settings.compress,
            namespace=namespace_of(self.config, mem_pool_host),
        )
        logger.info(
            "Canopy disk tier in %s: %d pages of %d bytes on disk, room for %d, policy %s.",
            settings.path,
            len(self.store),
            self._layout.page_bytes,
            settings.capacity_bytes // self._layout.page_bytes,
            settings.policy,
        )
        if self.store.unavailable is None:
            self._say_other_models(self.store)
        self._sweeper = threading.Thread(target=self._sweep, name="canopy-sweeper", daemon=True)
        self._sweeper.start()

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

    # ---- pages ----

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
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
            "unavailable": stats["unavailable"],
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
        self._guarded(self._catch_up, None)
        prefix = (extra_info.prefix_keys if extra_info is not None else None) or [None]
        first = self.pages.parent(keys[0], default=prefix[-1])
        metas = [self.pages.of(key) for key in keys]
        if None in metas:
            metas = self._described(metas, first)
        self._open_store().write(keys, views, metas, [first, *keys[:-1]])
        self.pages.written(keys)

    def _read(self, keys: Sequence[str], views: Sequence[Sequence[memoryview]]) -> list[bool]:
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

    def _sweep(self) -> None:
        """The sweeper's thread: uses and requests are passed on, expired pages go."""
        while not self._stop.wait(self.settings.sweep_s):
            begin = time.thread_time()
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


def namespace_of(config: HiCacheStorageConfig, pool: Any) -> str:
    """Everything that must be equal for a page to mean the same KV."""
    fields = {
        "model": _model(config.model_name),
        "pool": type(pool).__name__,
        "tag": getattr(pool, "storage_format_tag", None),
        "dtype": str(pool.dtype),
        "layout": pool.layout,
        "page_tokens": pool.page_size,
        "layers": [getattr(pool, name, None) for name in ("start_layer", "end_layer", "layer_num")],
        "heads": [getattr(pool, name, None) for name in ("head_num", "head_dim", "v_head_dim")],
        "tp": [0, 1] if config.is_mla_model else [config.tp_rank, config.tp_size],
        "pp": [config.pp_rank, config.pp_size],
        "cp": [config.attn_cp_rank, config.attn_cp_size],
        "dp": config.dp_rank,
        "dcp": [config.dcp_rank, config.dcp_size],
    }
    return "|".join(f"{name}={value}" for name, value in fields.items())


def _model(served_name: str | None) -> str:
    """The model: its names and, where it is a folder, a fingerprint of its files."""
    from sglang.srt.runtime_context import get_server_args

    try:
        arguments = get_server_args()
        path, revision = str(arguments.model_path), arguments.revision
        quantized = arguments.quantization
    except Exception:  # no server around it (tests, benchmarks)
        return str(served_name)
    digest = hashlib.sha256()
    folder = Path(path)
    if folder.is_dir():
        for file in sorted(folder.iterdir()):
            if file.suffix in (".json", ".safetensors", ".bin", ".gguf", ".pt"):
                status = file.stat()
                digest.update(f"{file.name}:{status.st_size}:{status.st_mtime_ns};".encode())
    return f"{served_name}:{path}@{revision}:{quantized}:{digest.hexdigest()[:16]}"


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy().reshape(-1)).cast("B")
