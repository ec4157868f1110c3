"""A live tree with all three tiers: device and host pools on CPU, and our disk store."""

import json
from array import array
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

from sglang_canopy.disk.store import DiskStore
from sglang_canopy.radix.live_request import LiveRequest, RequestPhase
from sglang_canopy.storage.page_table import PAGES
from sglang_canopy.storage.settings import DYNAMIC_BACKEND
from support.live_tree import LiveTree

FIRST_RANK = dict.fromkeys(
    ("tp_rank", "pp_rank", "attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "attn_dcp_rank"), 0
)


def prompt(number: int, token_count: int) -> list[int]:
    """Return the first ``token_count`` tokens of the prompt with this number."""
    return [number * 100 + i for i in range(token_count)]


def disk_settings(folder: Path | str, **overrides: Any) -> dict[str, Any]:
    """Return the keys of ``--hicache-storage-backend-extra-config`` of our store in ``folder``."""
    settings = {"path": str(folder), "capacity_bytes": 10**7, "policy": "canopy-lru"}
    return {**DYNAMIC_BACKEND, **settings, "prefetch_threshold": 1, "sweep_s": 3600, **overrides}


class DiskTree(LiveTree):
    """A live tree with a disk tier. After ``close``, a new one on the same folder is a restarted server.

    ``tokens``: slots of the device pool. ``disk``: settings of the store. ``rank_numbers``: the rank's place in its groups.
    """

    def __init__(
        self,
        folder: Path,
        tokens: int = 32,
        disk: dict[str, Any] | None = None,
        rank_numbers: dict[str, int] | None = None,
        **options: Any,
    ) -> None:
        PAGES.clear()
        store_settings = disk_settings(folder, **(disk or {}))
        options = {"page_size": 2, "host_tokens": 64, **options}
        self.epoch = 0.0
        """Seconds since 1970 at time 0; the same in every stamp."""
        self.delivers_reports = True
        """Whether ``settle`` delivers the uses that the tree reported to the store."""
        storage_arguments = {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config": json.dumps(store_settings),
            "hicache_storage_prefetch_policy": "wait_complete",
        }
        with get_parallel().override(**FIRST_RANK | (rank_numbers or {})):
            super().__init__(tokens, storage_arguments=storage_arguments, **options)
        self.storage = self.cache.cache_controller.storage_backend

    @property
    def store(self) -> DiskStore:
        return self.storage.store

    def detach(self) -> None:
        """Act as ``DELETE /hicache/storage-backend`` on an idle server."""
        self.settle()
        succeeded, message = self.cache.detach_storage_backend()
        assert succeeded, message

    def attach(self, folder: Path, **overrides: Any) -> str | None:
        """Attach the store to a tree in use. Return the error, if it fails."""
        with get_parallel().override(**FIRST_RANK):
            succeeded, message = self.cache.attach_storage_backend(
                storage_backend="dynamic",
                storage_backend_extra_config_json=json.dumps(disk_settings(folder, **overrides)),
                hicache_storage_prefetch_policy="wait_complete",
            )
        self.storage = self.cache.cache_controller.storage_backend
        return None if succeeded else message

    def request(self, time: float = 0.0, **fields: Any):
        ttl_s = fields.pop("ttl_s", None)
        request = LiveRequest(time=time, **fields)
        request.epoch, request.ttl_s = self.epoch, ttl_s
        self.core.requests.arrive(request)
        return request

    def settle(self) -> None:
        """Let every copy between the tiers finish, to the disk as well."""
        super().settle()
        cache = self.cache
        if cache.enable_storage:
            self._process_messages(n_backup=len(cache.ongoing_backup))
            if self.delivers_reports and self.storage is not None:
                self.storage.current.deliver_reports()

    def serve(self, tokens: list[int], time: float, **fields: Any) -> int:
        """Serve a request, reading from the disk. Return the tokens hit in any tier."""
        request = self.request(time, prompt_tokens=len(tokens), **fields)
        self.fetch(tokens)
        self.load_back(tokens)
        hit_tokens = self.match(tokens)
        request.cached_tokens = hit_tokens
        self.core.requests.finish(request)
        request.phase = RequestPhase.DONE
        self.insert(tokens, request)
        return hit_tokens

    def fetch(self, tokens: list[int], extra_key: str | None = None) -> int:
        """Read a path's pages from the disk into the host pool. Return the tokens read."""
        handle, cache = self.begin_fetch(tokens, extra_key), self.cache
        if handle not in cache.ongoing_prefetch:
            return 0
        self._process_messages(n_storage_hit=1)
        while handle in cache.ongoing_prefetch:
            self._process_messages(n_ack_prefetch=1)
        self._process_messages(n_release=cache.cache_controller.host_mem_release_queue.qsize())
        return cache.pop_prefetch_loaded_tokens(handle)

    def begin_fetch(self, tokens: list[int], extra_key: str | None = None) -> CacheRequestHandle:
        """Begin to read a path's pages, as SGLang does for an arriving request."""
        cache = self.cache
        key = RadixKey(array("q", tokens), extra_key)
        match = cache.match_prefix(MatchPrefixParams(key=key))
        anchor, matched = match.last_host_node, match.device_prefix_len + match.host_hit_length
        handle = CacheRequestHandle(f"fetch-{id(key)}-{self.core.clock.now}", 0)
        if cache.is_root(anchor) or cache.is_backuped(anchor):
            cache.prefetch_from_storage(
                handle,
                anchor,
                array("q", tokens[matched:]),
                cache.get_last_hash_value(anchor),
                matched_prefix_tokens=array("q", tokens[:matched]),
                extra_key=extra_key,
            )
        return handle

    def keys(self, tokens: list[int], extra_key: str | None = None) -> list[str]:
        """SGLang's names of the pages of a path."""
        key = RadixKey(array("q", tokens), extra_key).page_aligned(self.page_size)
        return get_storage_hash_str(key, None, page_size=self.page_size)

    def disk_tokens(self, tokens: list[int], extra_key: str | None = None) -> int:
        """Tokens of the path that the disk has."""
        return self.store.count_leading(self.keys(tokens, extra_key)) * self.page_size

    def close(self) -> None:
        """Act as a server that stops."""
        self.settle()
        self.cache.shutdown()

    def _process_messages(self, **message_counts: int) -> None:
        """Wait for ``message_counts`` messages of the storage's threads and process them."""
        queue_names = ("n_storage_hit", "n_ack_prefetch", "n_backup", "n_release")
        self.cache._drain_storage_control_queues_impl(
            **{name: message_counts.get(name, 0) for name in queue_names},
            extra_release_counts={},
            log_metrics=False,
        )
