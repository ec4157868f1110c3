"""The server's flags, and the transfer of the tiers' flags.

Runs once, in the launching process. ``ServerArgs`` carries the result to every rank; the disk tier
receives its options as SGLang's extra configuration.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping
from typing import Any

from sglang_canopy import declared
from sglang_canopy.config.queue import QueueFlags
from sglang_canopy.config.refusals import unsupported_reason
from sglang_canopy.config.server_options import RequestOptions
from sglang_canopy.config.setups import DISK
from sglang_canopy.config.tiers import (
    OTHER_TENANTS,
    PolicyChoice,
    TierFlags,
    TierOptions,
    split_config,
    tier_options,
)
from sglang_canopy.config.whatif import WhatifFlags
from sglang_canopy.declared import option_of, typed_values
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import live_names
from sglang_canopy.storage.settings import BACKEND, DYNAMIC_BACKEND, StorageSettings
from sglang_canopy.tenant import tenant_digest

logger = logging.getLogger(__name__)

_HOST_TIER_FIELDS = ("host_eviction", "host_ttl", "drain_s")
_OUR_DISK_FIELDS = ("disk_eviction", "disk", "drain_s")
"""Fields of ``TierFlags`` that need the tier."""

SHORT_FLAG = "--radix-eviction"
FLAG_CLASSES = (WhatifFlags, TierFlags, RequestOptions, QueueFlags)
"""Classes of flags; those shown by ``--help`` come first."""


def short_help() -> str:
    names = ", ".join(live_names())
    return f"Short for {SHORT_FLAG}-policy. Canopy adds {names}, and auto, which is wa and more."


def add_flags(group: argparse._ArgumentGroup, actions: Mapping[str, argparse.Action]) -> None:
    """Add Canopy's flags to SGLang's parser, and the backend to its choices. ``actions``: the parser's,
    by flag."""
    for flag_class in FLAG_CLASSES:
        declared.add_flags(group, flag_class)
    action = actions.get("--hicache-storage-backend")
    if action is not None and action.choices is not None and BACKEND not in action.choices:
        action.choices = [*action.choices, BACKEND]


def has_canopy_flags(server_args: Any, args: Any) -> bool:
    """Return whether a command line has one of Canopy's flags, or its storage backend."""
    return server_args.hicache_storage_backend == BACKEND or any(
        typed_values(flag_class, args) for flag_class in FLAG_CLASSES
    )


def resolve_tiers(server_args: Any, args: Any, is_canopy: bool) -> TierOptions:
    """Check the tiers' options against the command line, and write them to ``server_args``.
    ``is_canopy``: whether the device's policy is one of Canopy's. Raises ``CanopyError``."""
    typed_flags = typed_values(TierFlags, args)
    block_tokens = 64
    if is_canopy:
        settings, _ = split_config(
            server_args.radix_eviction_policy, server_args.radix_eviction_policy_config
        )
        block_tokens = settings.block_tokens
    tiers = tier_options(TierFlags(**typed_flags), block_tokens)
    uses_our_disk = server_args.hicache_storage_backend == BACKEND
    _check_tiers(server_args, typed_flags, tiers, is_canopy, uses_our_disk)
    if tiers.host_bytes and not (server_args.hicache_size or server_args.hicache_ratio):
        # SGLang's flag accepts whole gigabytes only, but its pools accept fractions.
        server_args.hicache_size = tiers.host_bytes / 1e9
    if uses_our_disk:
        server_args.hicache_storage_backend_extra_config = json.dumps(
            extra_config(
                server_args, tiers, is_canopy, server_args.hicache_storage_backend_extra_config
            )
        )
        server_args.hicache_storage_backend = "dynamic"
    return tiers


def _check_tiers(
    server_args: Any,
    typed_flags: Mapping[str, Any],
    tiers: TierOptions,
    is_canopy: bool,
    uses_our_disk: bool,
) -> None:
    for field in typed_flags:
        flag = option_of(TierFlags, field).flag
        if field in _HOST_TIER_FIELDS and not is_canopy:
            raise CanopyError(f"{flag} needs --radix-eviction with a Canopy policy, such as wa")
        if field in _HOST_TIER_FIELDS and not server_args.enable_hierarchical_cache:
            raise CanopyError(f"{flag} needs a host tier; add --enable-hierarchical-cache")
        if field in _OUR_DISK_FIELDS and not uses_our_disk:
            raise CanopyError(
                f"{flag} needs our disk tier; add --enable-hierarchical-cache "
                "--hicache-storage-backend canopy"
            )
    if uses_our_disk and not server_args.enable_hierarchical_cache:
        raise CanopyError(
            "--hicache-storage-backend canopy needs a host tier; add --enable-hierarchical-cache"
        )
    if uses_our_disk:
        refusal = unsupported_reason(DISK, server_args)
        if refusal:
            raise CanopyError(f"--hicache-storage-backend canopy: {refusal}")
    # Pages of other backends have no TTL. A dynamic one may be Canopy's.
    ttl_backends = (BACKEND, "dynamic", "mooncake")
    if tiers.ttl is not None and server_args.hicache_storage_backend not in ttl_backends:
        logger.warning("--canopy-ttl acts on a tier that this server lacks")


def extra_config(
    server_args: Any, tiers: TierOptions, is_canopy: bool, config_text: str | None
) -> dict[str, Any]:
    """Complete the extra configuration ``config_text`` with Canopy's options, and validate it. Raises
    ``CanopyError``, before the model is loaded."""
    extra = parse_extra_config(config_text)
    disk_choice = tiers.disk
    if disk_choice is None and is_canopy:
        name, config = server_args.radix_eviction_policy, server_args.radix_eviction_policy_config
        _, options = split_config(name, config)
        disk_choice = PolicyChoice(name, options)
    if disk_choice is not None:
        if "policy" not in extra:
            extra["policy_config"] = extra.get("policy_config", dict(disk_choice.config))
        extra.setdefault("policy", disk_choice.name)
    if tiers.ttl is not None:
        extra.setdefault("ttl", tiers.ttl.to_json())
    if tiers.quotas:
        # Hide tenants' names: they are secret, and any user can read the server's arguments.
        extra.setdefault("quota_bytes", {_hide_tenant(t): size for t, size in tiers.quotas.items()})
    if not is_canopy:
        # Our tree reports the parent of each page; with SGLang's trees, SGLang must pass it.
        extra.setdefault("hicache_storage_pass_prefix_keys", True)
    StorageSettings.from_extra(extra)
    # SGLang knows the name ``canopy`` only as its backend ``dynamic``, with a class path.
    return {**extra, **DYNAMIC_BACKEND}


def _hide_tenant(tenant: str) -> str:
    return tenant if tenant == OTHER_TENANTS or tenant.startswith("#") else tenant_digest(tenant)


def parse_extra_config(text: str | None) -> dict[str, Any]:
    """Parse SGLang's extra configuration of the storage, JSON or ``@FILE.json``. Raises ``CanopyError``."""
    flag = "--hicache-storage-backend-extra-config"
    if not text:
        return {}
    if text.startswith("@") and not text.endswith(".json"):
        raise CanopyError(f"{flag}: with the backend 'canopy', give JSON or a file @NAME.json")
    try:
        if text.startswith("@"):
            with open(text[1:], encoding="utf-8") as file:
                text = file.read()
        config = json.loads(text)
    except (OSError, ValueError) as error:
        raise CanopyError(f"{flag}: {error}") from None
    if not isinstance(config, dict):
        raise CanopyError(f"{flag} must be a JSON object, got {text:.60}")
    return config
