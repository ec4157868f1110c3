"""SGLang's Mooncake backend with soft pins from Canopy's TTLs.

Mooncake Store is shared by many servers and evicts objects without a lease, those without a soft pin first.
A page with a TTL is put with a soft pin of that duration. The pin starts at the write; reads and existence
queries do not renew it. The tree therefore offers a page again if it is used after half of that time
(``disk_retry``), and the page is rewritten. Features that do not map: docs/guide/mooncake.md.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

from sglang_canopy.disk.page import PageMeta
from sglang_canopy.storage.page_table import PAGES
from sglang_canopy.ttl.table import TTLTable

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MOONCAKE_BACKEND = "mooncake"
MAX_PIN_S = 86_400.0
"""Default of the master's ``max_kv_soft_pin_ttl``; longer pins are refused."""


def install_backend(ttl: TTLTable | None) -> None:
    """Register this class, with these TTLs, as ``--hicache-storage-backend mooncake``."""
    CanopyMooncakeStore.ttl = ttl
    StorageBackendFactory._registry.pop(MOONCAKE_BACKEND, None)
    StorageBackendFactory.register_backend(MOONCAKE_BACKEND, __name__, CanopyMooncakeStore.__name__)


def pin_s(meta: PageMeta | None, ttl: TTLTable | None, now: float) -> float:
    """Return the seconds for which to pin a page; 0 for no pin. An infinite TTL gives ``MAX_PIN_S``.
    Pages without metadata are not pinned. Without configured TTLs (``ttl`` is ``None``), only the
    page's own TTL and ``keep_until`` count, because pinning all pages would favour no page."""
    if meta is None:
        return 0.0
    if ttl is not None:
        seconds = ttl.ttl_s(meta.group, meta.category, meta.ttl_s)
    else:
        seconds = meta.ttl_s or 0.0
    if meta.keep_until is not None:
        seconds = max(seconds, meta.keep_until - now)
    return min(max(seconds, 0.0), MAX_PIN_S)


class CanopyMooncakeStore(MooncakeStore):
    """``MooncakeStore`` with pins by TTL. Runs on HiCache's threads."""

    ttl: TTLTable | None = None
    """The server's disk TTLs, set by ``install_backend`` before SGLang creates the backend."""

    def __init__(self, storage_config: Any = None, mem_pool: Any = None) -> None:
        super().__init__(storage_config, mem_pool)
        self.pages = PAGES
        """Page table of the tree, which describes pages for backends with this attribute."""
        self._pin_ms = 0
        """Pin of the pages being put, by a single thread."""
        self._has_warned = False

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        _drop_reports()
        now, stored_flags = time.time(), []
        pins = [math.ceil(1000 * pin_s(PAGES.description(key), self.ttl, now)) for key in keys]
        indices = host_indices.reshape(len(keys), -1)
        start = 0
        for (self._pin_ms, rewrite), run in itertools.groupby(zip(pins, PAGES.take_rewrites(keys))):
            stop = start + len(list(run))
            run_keys, slots = keys[start:stop], indices[start:stop].reshape(-1)
            if rewrite and self._pin_ms:
                stored_flags += self._rewrite(run_keys, slots)
            else:
                stored_flags += super().batch_set_v1(run_keys, slots, extra_info)
            start = stop
        self._pin_ms = 0
        PAGES.drop_written([key for key, stored in zip(keys, stored_flags) if stored])
        if not all(stored_flags):
            PAGES.add_refusal()
        return stored_flags

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        _drop_reports()
        return super().batch_exists(keys, extra_info)

    def pinned_s(self, meta: PageMeta, now: float) -> float:
        """Return the pin of a page written now, in seconds; 0 if a pin cannot be renewed."""
        return pin_s(meta, self.ttl, now) if hasattr(self.store, "batch_upsert_from") else 0.0

    def _rewrite(self, keys: list[str], slots: torch.Tensor) -> list[bool]:
        """Put pages that may exist, to start a new pin; SGLang's own put skips existing pages."""
        tagged_keys = self._tag_keys(keys)
        names, pointers, sizes = self._batch_preprocess(tagged_keys, slots)
        config = self._pin_configuration()
        if config is None or self._uses_multi_buffer(pointers):
            return [True] * len(keys)  # Mooncake has no upsert for pages in several buffers
        if self._can_use_group_semantics():
            config.group_ids = self._expand_group_ids(tagged_keys, len(names) // len(keys))
        results = self.store.batch_upsert_from(names, pointers, sizes, config)
        self._warn_if_refused(results)
        return self._batch_postprocess(results, is_set_operate=True)

    def _put_batch_zero_copy_impl(
        self,
        key_strs: list[str],
        buffer_ptrs: list[Any],
        buffer_sizes: list[Any],
        group_ids: list[str] | None = None,
        session_ids: list[str] | None = None,
    ) -> list[int]:
        objects = (key_strs, buffer_ptrs, buffer_sizes)
        config = self._pin_configuration() if self._pin_ms else None
        if config is None:
            return super()._put_batch_zero_copy_impl(*objects, group_ids, session_ids)
        if group_ids is not None:
            config.group_ids = group_ids
        if session_ids is not None:
            config.session_ids = session_ids
        if self._uses_multi_buffer(buffer_ptrs):
            results = self.store.batch_put_from_multi_buffers(*objects, config)
        else:
            results = self.store.batch_put_from(*objects, config)
        self._warn_if_refused(results)
        return results

    def _warn_if_refused(self, results: Sequence[int]) -> None:
        if any(results) and not self._has_warned:
            # NOTE: a master with a smaller max_kv_soft_pin_ttl refuses puts with longer pins.
            self._has_warned = True
            logger.warning(
                "Mooncake took %d of %d objects with a pin of %d ms (codes %s); if its log says "
                "soft_pin_ttl, start the master with a larger -max_kv_soft_pin_ttl. Logged once.",
                sum(r == 0 for r in results),
                len(results),
                self._pin_ms,
                sorted({r for r in results if r}),
            )

    def _pin_configuration(self) -> Any:
        """Return a configuration with a pin of ``_pin_ms``, or ``None`` if Mooncake has no pins."""
        if not self._replicate_config_cls:
            return None
        config: Any = self._replicate_config_cls()
        if hasattr(config, "soft_pin_ttl_ms"):
            from mooncake.store import SoftPinAction

            config.soft_pin_action = SoftPinAction.ENABLE
            config.soft_pin_ttl_ms = self._pin_ms
        elif hasattr(config, "with_soft_pin"):  # older versions: the master sets the duration
            config.with_soft_pin = True
        else:
            return None
        return config


def _drop_reports() -> None:
    """Discard reported uses and requests: Mooncake has no Canopy policy."""
    PAGES.take_uses()
    PAGES.take_requests()
