"""Attach Canopy's disk tier to a running server by name (``PUT /hicache/storage-backend``)."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang_canopy.config.refusals import unsupported
from sglang_canopy.config.server_options import options_of
from sglang_canopy.config.setups import DISK
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import live_names
from sglang_canopy.server.start.flags import extra_config
from sglang_canopy.storage.settings import BACKEND


def storage_attached(
    original: Callable[..., tuple[bool, str]],
    cache: Any,
    storage_backend: str,
    storage_backend_extra_config_json: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[bool, str]:
    """Hook around ``attach_storage_backend``: translate ``canopy`` as at start.

    The flags given at start apply, and its extra configuration is the default.
    """
    if storage_backend == BACKEND:
        try:
            extra = _extra_config(cache, storage_backend_extra_config_json)
        except CanopyError as error:
            return False, str(error)
        storage_backend, storage_backend_extra_config_json = "dynamic", json.dumps(extra)
    return original(cache, storage_backend, storage_backend_extra_config_json, *args, **kwargs)


def _extra_config(cache: Any, given: str | None) -> dict[str, Any]:
    # SGLang's import loads the plugin, so the plugin's modules import SGLang only when called.
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.runtime_context import get_server_args

    server_args = get_server_args()
    model = SimpleNamespace(
        is_hybrid_swa=ComponentType.SWA in cache.tree_components,
        is_hybrid_ssm=ComponentType.MAMBA in cache.tree_components,
    )
    refusal = unsupported(DISK, server_args, model)
    if refusal:
        raise CanopyError(f"hicache_storage_backend {BACKEND}: {refusal}")
    ours = server_args.radix_eviction_policy in live_names()
    if given is None:
        given = server_args.hicache_storage_backend_extra_config
    return extra_config(server_args, options_of(server_args).tiers, ours, given)
