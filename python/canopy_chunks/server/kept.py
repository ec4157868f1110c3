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
    """Give a new request the extra key of its approximate KV, if it may reuse documents.

    Call it before the prefix is matched, once SGLang has set all fields of ``req``. Later calls,
    after a retraction, have no effect.
    """
    if request.kept_key is not None or not engine.eligible(req, request):
        return
    if engine.is_exact(request):
        return
    remember_clients_key(req)
    request.kept_key = req.extra_key = documents_key(req.extra_key, _name(engine, request))


def _name(engine: ChunkEngine, request: ChunkRequest) -> str:
    """Return a digest of all settings that determine the error of the KV. Equal on all ranks."""
    if request.ratio is not None:
        ratio: Any = request.ratio
    else:
        ratio = [
            *(engine.options.ratio, sorted(engine.ratios.items()), request.step),
            engine.least_ratio(request),
        ]
    parts = [
        VERSION,
        engine.model.identity,
        engine.options.encode,
        engine.stand_ins,
        engine.options.min_tokens,
        request.selector,
        ratio,
        engine.watch.epoch(request.tenant),
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
    recorder = getattr(core, "kv_events", None)
    if recorder is not None and recorder.enabled:
        core.kv_events = ExactEvents(recorder)  # type: ignore[union-attr]
