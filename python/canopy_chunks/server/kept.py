"""Approximate KV in SGLang's own tree, under extra keys reserved for requests with documents.

The next turn of a conversation, a retry and the other samples of a prompt match the KV of the
earlier turn, and compute only new tokens. SGLang shares KV only under equal extra keys, so an exact
request never matches it, and all KV under such a key counts as approximate. Policies, tiers and
quotas treat it like other KV. A request with ratio 1 keeps its client's key, because its KV is
exact.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from canopy_chunks.server.request import ChunkRequest
from sglang_canopy.tenant import documents_key, is_documents_key, remember_clients_key

if TYPE_CHECKING:
    from canopy_chunks.server.engine import ChunkEngine

VERSION = 1
"""Part of each name. Increment it if the KV computed for the same settings changes."""


def enter(engine: ChunkEngine, req: Any, request: ChunkRequest) -> None:
    """Give a new request the extra key of its approximate KV, if that saves more than its exact
    prefix.

    Call it before the prefix is matched, once SGLang has set all fields of ``req``. A prompt that is
    too long to be planned may still extend KV of its earlier turns. Later calls, after a retraction,
    have no effect.
    """
    if request.kept_key is not None or request.has_begun:
        return
    eligible = engine.eligible(req, request)
    if not (eligible or request.too_long) or engine.is_exact(request):
        return
    key = documents_key(req.extra_key, _name(engine, request))
    exact, kept = engine.matched(req, req.extra_key), engine.matched(req, key)
    total = len(req.origin_input_ids)
    if kept + (engine.saved(request, kept, total) if eligible else 0) <= exact:
        return
    remember_clients_key(req)
    request.kept_key = req.extra_key = key


def matched(tree_cache: Any, req: Any, extra_key: str | None) -> int:
    """Return the tokens of a request that the tree holds on device or host under an extra key."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    ids = req.origin_input_ids + req.output_ids
    key = RadixKey(ids, extra_key, cache_salt=req.cache_salt)
    found = tree_cache.match_prefix(MatchPrefixParams(key=key))
    return int(found.device_prefix_len + found.host_hit_length)


def _name(engine: ChunkEngine, request: ChunkRequest) -> str:
    """Return a digest of all settings that determine the error of the KV. Equal on all ranks."""
    if request.ratio is not None:
        ratio: Any = request.ratio
    else:
        ratio = [engine.options.ratio, sorted(engine.ratios.items()), request.step]
    parts = [
        VERSION,
        engine.model.identity,
        engine.options.encode,
        engine.stand_ins,
        engine.options.min_tokens,
        request.selector,
        ratio,
        engine.checker.epoch(request.tenant),
        engine.start,
    ]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()


class ExactEvents:
    """SGLang's recorder of KV events, without events of approximate KV.

    A block's event has its tokens but not its extra key, so a router would mistake the block for
    exact KV.
    """

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorder, name)

    def record_store(self, node: Any, *args: Any, **kwargs: Any) -> None:
        """Record as SGLang does, but ignore nodes of approximate KV."""
        if not is_documents_key(node.key.extra_key):
            self._recorder.record_store(node, *args, **kwargs)

    def record_remove(self, node: Any, *args: Any, **kwargs: Any) -> None:
        """Record as SGLang does, but ignore nodes of approximate KV."""
        if not is_documents_key(node.key.extra_key):
            self._recorder.record_remove(node, *args, **kwargs)


def announce_exact_only(tree_cache: Any) -> None:
    """Omit approximate KV from the tree's KV events, if the server publishes any."""
    core = getattr(tree_cache, "tree_core", None)
    if core is None or not core.kv_events.enabled:
        return
    if hasattr(core.kv_events, "publishes"):  # Canopy's own recorder still counts these nodes
        core.kv_events.publishes = lambda node: not is_documents_key(node.key.extra_key)
    else:
        core.kv_events = ExactEvents(core.kv_events)
