"""Hooks of document reuse on a running scheduler: requests, idle time, status, deletion."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from collections import defaultdict
from typing import Any

from canopy_documents.fuse.rows import always_false
from canopy_documents.server import kept
from canopy_documents.server.model_view import answer_of_first_rank
from canopy_documents.server.request import PLANNING_FAILED, document_request_of, engine_of
from sglang_canopy import releases
from sglang_canopy.disk.store import DiskStore
from sglang_canopy.tenant import tenants_of_key
from sglang_canopy.wire.request_state import state_of
from sglang_canopy.wire.stamp import DOCUMENTS

logger = logging.getLogger(__name__)

PAUSE_MS = 50
"""Pause between a batch and background work. A quick client's next turn arrives within it, and
would otherwise wait for the piece in progress."""


def read_documents(scheduler: Any, req: Any) -> bool:
    """Read a created request's documents. Returns whether it has any; its extra key is set when it
    is queued."""
    engine, state = engine_of(scheduler), state_of(req)
    if engine is None:
        return False
    try:
        state.documents = engine.new_request(req)
        if state.documents is not None:
            engine.library.read_ahead(state.documents)
    except Exception:
        logger.exception("canopy: a request's documents could not be read; it runs normally")
        engine.counts["fallbacks"] += 1
    return state.documents is not None


def set_extra_key(scheduler: Any, req: Any) -> None:
    """Set the extra key of a queued request with documents, initially and after each retraction."""
    request, engine = document_request_of(req), engine_of(scheduler)
    if request is None or engine is None:
        return
    try:
        kept.choose_extra_key(engine, req, request)
    except Exception:
        logger.exception("canopy: a request's namespace could not be named; it runs normally")
        engine.counts["fallbacks"] += 1
        request.is_decided, request.reason = True, PLANNING_FAILED


def work_when_idle(scheduler: Any, *_: Any, **__: Any) -> None:
    """Hook before ``Scheduler.on_idle``: encode and check until other work arrives."""
    engine = engine_of(scheduler)
    if engine is None:
        return
    disk = engine.library.store.disk
    if disk is not None and scheduler.is_fully_idle():
        disk.drop_reads()
    if not engine.has_idle_work:
        return
    socket = scheduler.ipc_channels.recv_from_tokenizer

    def has_new_work(wait_ms: int) -> bool:
        return not scheduler.is_fully_idle() or (socket is not None and bool(socket.poll(wait_ms)))

    while engine.has_idle_work:
        # Once per batch, even if a monitor reads the status in between.
        wait_ms = PAUSE_MS if engine.has_run else 0
        engine.has_run = False
        if answer_of_first_rank(has_new_work(wait_ms)):
            return
        # Ranks would not stop at the same layer.
        has_request_come = (
            always_false if engine.model.ranks is not None else functools.partial(has_new_work, 0)
        )
        engine.work_when_idle(has_request_come)


def replace_stale_store(success: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    """Hook after ``Scheduler.flush_cache``. Documents stay unless the weights changed."""
    engine = engine_of(scheduler)
    if engine is not None and success and engine.replace_if_weights_changed():
        logger.info("canopy: the weights changed, so a new document store begins")


def add_counters(result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    """Hook after ``Scheduler.get_internal_state``: add the counters.

    Any client may read the counters. They include no addresses or lengths of a tenant's documents.
    ``READINGS_PER_S`` limits the rate of collection.
    """
    engine = engine_of(scheduler)
    if engine is None:
        return
    if engine.last_reading is None or engine.readings.take(None, time.monotonic()):
        setting = dataclasses.asdict(engine.setting) if engine.setting is not None else None
        engine.last_reading = {**engine.stats(), "setting": setting}
    result.internal_state[DOCUMENTS] = engine.last_reading


def delete_documents(scheduler: Any, tenants: list[str]) -> bool | None:
    """Delete all documents of tenants, and the KV of their prompts. Returns whether any was held;
    ``None`` without document reuse."""
    engine = engine_of(scheduler)
    if engine is None:
        return None
    any_deleted = False
    for name in tenants:
        any_deleted |= engine.library.delete(name or None)
        any_deleted |= delete_kv(scheduler.tree_cache, name or None, scheduler.enable_lora)
        engine.checker.forget(name or None)
    return any_deleted


def complete_report(req: Any, *_: Any, **__: Any) -> None:
    """Hook before ``checkpoint_kv_cache`` and ``release_kv_cache``: complete a request's report.

    Its forward is then done and the answer not yet sent.
    """
    request = document_request_of(req)
    if request is not None and request.is_reported:
        request.finish_report()


def check_insert(_component: Any, req: Any, *_: Any, **__: Any) -> None:
    """Hook before ``TreeComponent.prepare_for_caching_req``, which every insert calls.

    Raises RuntimeError if approximate KV would be inserted under a key that exact requests match.
    """
    request = document_request_of(req)
    if request is not None and request.is_fused and not request.is_apart(req):
        raise RuntimeError(
            f"request {req.rid} has reused KV of documents and would enter the exact prefix tree"
        )


def is_request_level(original: Any, streamer: Any, key: str) -> bool:
    """Hook around ``SchedulerOutputStreamer.is_request_level_customized_info_key``."""
    return key == DOCUMENTS or original(streamer, key)


_ALL_TOKENS = 1 << 40
"""More tokens than any tier holds."""


def delete_kv(cache: Any, tenant: str | None, has_lora: bool = False) -> bool:
    """Delete all KV of a tenant's prompts, exact or approximate, except what running requests use.

    SGLang's Rust core cannot be walked by tenant: there all KV that no request uses is evicted. Pages
    of Canopy's disk tier are deleted on a thread. ``has_lora``: whether the server has adapters. Returns
    whether any was held.
    """
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

    core = getattr(cache, "tree_core", None)
    if core is None:
        return False
    if isinstance(core, UnifiedTreeCore):
        any_deleted = False
        for subtree in list(core.root_node.children.values()):
            if tenant in tenants_of_key(subtree.key.extra_key, subtree.key.cache_salt, has_lora):
                nodes = [subtree]
                for node in nodes:
                    nodes += node.children.values()
                for node in reversed(nodes):
                    any_deleted |= _delete_childless(cache, node)
    else:
        any_deleted = _evict_all(cache)
    storage = cache.cache_controller.storage_backend if cache.cache_controller else None
    store = getattr(storage, "store", None)
    if isinstance(store, DiskStore):
        any_deleted |= tenant in store.count_pages()["tenants"]
        threading.Thread(target=store.remove_tenant, args=(tenant,), daemon=True).start()
    return any_deleted


def _evict_all(cache: Any) -> bool:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    evicted = cache.evict(EvictParams(num_tokens=_ALL_TOKENS)).num_tokens_evicted
    if cache.cache_controller is not None:
        evicted += cache.evict_host(_ALL_TOKENS)
    return bool(evicted)


def _delete_childless(cache: Any, node: Any) -> bool:
    """Delete a node without children, unless it is locked or moves between tiers."""
    core = cache.tree_core
    is_removed = node.id not in core._node_arena  # removed with its last child
    if is_removed or node.children or _is_busy(node):
        return False
    tracker: dict[Any, int] = defaultdict(int)
    device: dict[Any, list[Any]] = defaultdict(list)
    host: dict[Any, list[Any]] = defaultdict(list)
    actions: list[Any] = []
    delete = core._evict_host_leaf if node.evicted else core._delete_unbacked_device_leaf
    try:
        releases.call_eviction(
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
