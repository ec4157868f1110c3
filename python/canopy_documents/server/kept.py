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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from canopy_documents.server.request import DocumentRequest
from sglang_canopy.tenant import documents_key, is_documents_key, remember_clients_key

if TYPE_CHECKING:
    from canopy_documents.server.engine import DocumentEngine

KV_VERSION = 1
"""Part of each name. Increment it if the KV computed for the same settings changes."""


def choose_extra_key(engine: DocumentEngine, req: Any, request: DocumentRequest) -> None:
    """Give a new request the extra key of its approximate KV, if that saves more than its exact
    prefix.

    Call it before the prefix is matched, once SGLang has set all fields of ``req``. A prompt that is
    too long to be planned may still extend KV of its earlier turns. Later calls, after a retraction,
    have no effect.
    """
    if request.kept_key is not None or request.has_begun:
        return
    is_eligible = engine.is_eligible(req, request)
    if not (is_eligible or request.too_long) or engine.is_exact(request):
        return
    key = documents_key(req.extra_key, _namespace_digest(engine, request))
    exact_tokens = engine.count_matched_tokens(req, req.extra_key)
    kept_tokens = engine.count_matched_tokens(req, key)
    total = len(req.origin_input_ids)
    saved_tokens = engine.saved_tokens(request, kept_tokens, total) if is_eligible else 0
    if kept_tokens + saved_tokens <= exact_tokens:
        return
    remember_clients_key(req)
    request.kept_key = req.extra_key = key


def count_matched_tokens(tree_cache: Any, req: Any, extra_key: str | None) -> int:
    """Return the tokens of a request that the tree holds on device or host under an extra key."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    key = RadixKey(req.origin_input_ids + req.output_ids, extra_key, cache_salt=req.cache_salt)
    match = tree_cache.match_prefix(MatchPrefixParams(key=key))
    return int(match.device_prefix_len + match.host_hit_length)


def _namespace_digest(engine: DocumentEngine, request: DocumentRequest) -> str:
    """Return a digest of all settings that determine the error of the KV. Equal on all ranks."""
    if request.ratio is not None:
        ratio: Any = request.ratio
    else:
        ratio = [engine.options.ratio, sorted(engine.ratios.items()), request.quality_level]
    parts = [
        KV_VERSION,
        engine.model.identity,
        engine.stand_ins,
        engine.options.selector,
        ratio,
        engine.checker.reuse_version(request.tenant),
        engine.process_id,
    ]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()


def _exact_only(record: Callable[..., None]) -> Callable[..., None]:
    """Return SGLang's recording function for exact KV alone.

    A block's event has its tokens but not its extra key, so a router would mistake approximate KV for
    exact KV.
    """

    def record_exact(node: Any, *args: Any, **kwargs: Any) -> None:
        if not is_documents_key(node.key.extra_key):
            record(node, *args, **kwargs)

    return record_exact


def omit_approximate_events(tree_cache: Any) -> None:
    """Omit approximate KV from the tree's KV events, if the server publishes any."""
    core = getattr(tree_cache, "tree_core", None)
    if core is None or not core.kv_events.enabled:
        return
    if hasattr(core.kv_events, "is_published"):  # Canopy's own recorder still counts these nodes
        core.kv_events.is_published = lambda node: not is_documents_key(node.key.extra_key)
        return
    for name in ("record_store", "record_remove"):
        if (record := getattr(core.kv_events, name, None)) is not None:  # the Rust core has none
            setattr(core.kv_events, name, _exact_only(record))
