"""Deletion of a tenant's KV from SGLang's tree: device, host memory and the disk tier."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from sglang_canopy import releases
from sglang_canopy.disk.store import DiskStore
from sglang_canopy.tenant import tenants_of_key

_ALL = 1 << 40
"""More tokens than any tier holds."""


def delete_kv(cache: Any, tenant: str | None) -> bool:
    """Delete all KV of a tenant's prompts, exact or approximate, except what running requests use.

    SGLang's Rust core cannot be walked by tenant: there all KV that no request uses is evicted. Pages
    of Canopy's disk tier are deleted on a thread. Returns whether any was deleted.
    """
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

    core = getattr(cache, "tree_core", None)
    if core is None:
        return False
    if isinstance(core, UnifiedTreeCore):
        done = False
        for top in list(core.root_node.children.values()):
            if tenant in tenants_of_key(top.key.extra_key, top.key.cache_salt):
                for node in list(_leaves_first(top)):
                    done |= _delete(cache, node)
    else:
        done = _evict_all(cache)
    storage = cache.cache_controller.storage_backend if cache.cache_controller else None
    store = getattr(storage, "store", None)
    if isinstance(store, DiskStore):
        threading.Thread(target=store.remove_tenant, args=(tenant,), daemon=True).start()
    return done


def _evict_all(cache: Any) -> bool:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    evicted = cache.evict(EvictParams(num_tokens=_ALL)).num_tokens_evicted
    if cache.cache_controller is not None:
        evicted += cache.evict_host(_ALL)
    return bool(evicted)


def _leaves_first(top: Any) -> Iterator[Any]:
    found, at = [top], 0
    while at < len(found):
        found += found[at].children.values()
        at += 1
    yield from reversed(found)


def _delete(cache: Any, node: Any) -> bool:
    """Delete a node without children, unless it is locked or moves between tiers."""
    core = cache.tree_core
    gone = node.id not in core._node_arena  # removed with its last child
    if gone or node.children or _is_busy(node):
        return False
    tracker: dict[Any, int] = defaultdict(int)
    device: dict[Any, list[Any]] = defaultdict(list)
    host: dict[Any, list[Any]] = defaultdict(list)
    actions: list[Any] = []
    delete = core._evict_host_leaf if node.evicted else core._delete_unbacked_device_leaf
    try:
        releases.evict(
            delete, node, tracker, device_frees=device, host_frees=host, cache_actions=actions
        )
    finally:
        cache._free_values(device, host)
        cache._apply_cache_actions(actions)
    return True


def _is_busy(node: Any) -> bool:
    moves = node.write_through_pending_id, node.load_back_pending_id
    locks = (n for data in node.component_data for n in (data.lock_ref, data.host_lock_ref))
    return moves != (None, None) or any(locks)
