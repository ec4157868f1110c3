"""The server's flags, and the way of those of the tiers to where each is needed.

Runs once, in the launching process. The result is noted on ``ServerArgs`` and travels to every
rank with it; what the disk tier needs goes to it as SGLang's own extra configuration.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_canopy import declared
from sglang_canopy.config.gate import GateFlags
from sglang_canopy.config.queue import QueueFlags
from sglang_canopy.config.refusals import DISK, unsupported
from sglang_canopy.config.tiers import (
    OTHERS,
    PolicyChoice,
    TierFlags,
    TierOptions,
    split_config,
    tier_options,
)
from sglang_canopy.config.whatif import WhatifFlags
from sglang_canopy.declared import declare, from_args, option_of
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import live_names
from sglang_canopy.request import client_hints, identity, owner
from sglang_canopy.storage.settings import StorageSettings
from sglang_canopy.tenant import tenant_digest

logger = logging.getLogger(__name__)

NOTE = "_canopy_tiers"
"""Where the options are noted on ``ServerArgs``."""
BACKEND = "canopy"
"""Our name for ``--hicache-storage-backend``."""

DYNAMIC_BACKEND = {
    "backend_name": BACKEND,
    "module_path": "sglang_canopy.storage.backend",
    "class_name": "CanopyStorage",
    "interface_v1": 1,
}
"""How SGLang is told of our backend: it loads it by module and class."""
_IN_MEMORY = ("host_eviction", "host_eviction_config")
_ON_DISK = ("disk_eviction", "disk_eviction_config", "quotas", "ttl_window_s")

SHORT = "--radix-eviction"


def short_help() -> str:
    """What ``SHORT`` is."""
    return f"Short for {SHORT}-policy. Canopy adds: {', '.join(live_names())}."


@dataclass(frozen=True, slots=True)
class RequestFlags:
    """Flags about what requests may ask for."""

    enable_forced_output: bool = declare(
        False,
        "--canopy-enable-forced-output",
        "Obey custom_params.canopy_force_output, a list of token ids that the response must "
        "consist of. For replaying traces; keep it off in production.",
    )
    client_hints: str = declare(
        client_hints.ON,
        client_hints.FLAG,
        "Whose hints change what is evicted (POST /canopy/hint, and the fields canopy_over, "
        "canopy_return_in_s, canopy_keep_s, canopy_ttl_s, canopy_pin_s and "
        "canopy_parent of requests, with what stands for them): everybody's, nobody's, or only those with the admin key or from a gateway that sends the "
        f"secret of ${client_hints.SECRET_VARIABLE} (or of the file "
        f"${client_hints.SECRET_FILE_VARIABLE}) as the header {client_hints.GATEWAY_HEADER}.",
        choices=client_hints.MODES,
    )
    identity_sources: tuple[str, ...] = declare(
        identity.sources_of(identity.SESSIONS),
        identity.FLAG,
        "Which fields and headers of clients, agents and gateways name the conversation of a "
        "request, beside canopy_conversation: sessions (those that name one conversation), all "
        "(those that name a user, too), none, or some of them with commas between.",
        metavar="LIST",
        parse=identity.sources_of,
        shown_default=identity.SESSIONS,
    )
    require_tenant: str = declare(
        owner.OFF,
        owner.FLAG,
        "What becomes of a generation request that names no tenant (cache_salt, extra_key), which a "
        "gateway may have dropped: off warns once if other requests name one, warn warns once in "
        "any case, on answers 400.",
        choices=owner.MODES,
    )
    carriers: str = declare(
        owner.NO_CARRIERS,
        owner.CARRIERS_FLAG,
        "Where else a generation request may name its tenant, for gateways that drop the body's own "
        f"fields: metadata ({owner.METADATA['cache_salt']}, {owner.METADATA['extra_key']}, and our "
        f"other keys too), headers ({owner.HEADERS['cache_salt']}, {owner.HEADERS['extra_key']}), or "
        "both. Your outermost gateway must overwrite those places.",
        choices=owner.CARRIERS,
    )


def add_flags(group: argparse._ArgumentGroup, options: Mapping[str, argparse.Action]) -> None:
    """Put our flags into SGLang's parser, and our backend among its choices."""
    declared.add_flags(group, RequestFlags)
    declared.add_flags(group, QueueFlags)
    declared.add_flags(group, TierFlags)
    declared.add_flags(group, GateFlags)
    declared.add_flags(group, WhatifFlags)
    backend = options.get("--hicache-storage-backend")
    if backend is not None and backend.choices is not None and BACKEND not in backend.choices:
        backend.choices = [*backend.choices, BACKEND]


def apply(server_args: Any, args: Any, ours: bool) -> TierOptions:
    """Check the options against the rest of the command line and put them where they act.

    ``ours``: whether the device's policy is one of Canopy's. Raises ``CanopyError``.
    """
    given = from_args(TierFlags, args)
    block_tokens = 64
    if ours:
        settings, _ = split_config(
            server_args.radix_eviction_policy, server_args.radix_eviction_policy_config
        )
        block_tokens = settings.block_tokens
    tiers = tier_options(TierFlags(**given), block_tokens)
    storage = server_args.hicache_storage_backend == BACKEND
    _check(server_args, given, tiers, ours, storage)
    if tiers.host_bytes and not (server_args.hicache_size or server_args.hicache_ratio):
        # SGLang's flag takes whole gigabytes, its pools any number of them.
        server_args.hicache_size = tiers.host_bytes / 1e9
    if storage:
        server_args.hicache_storage_backend_extra_config = json.dumps(
            _extra_config(server_args, tiers, ours)
        )
        server_args.hicache_storage_backend = "dynamic"
    setattr(server_args, NOTE, tiers)
    return tiers


def _check(
    server_args: Any, given: Mapping[str, Any], tiers: TierOptions, ours: bool, storage: bool
) -> None:
    for field in given:
        flag = option_of(TierFlags, field).flag
        if field in _IN_MEMORY and not ours:
            raise CanopyError(
                f"{flag} needs --radix-eviction with a policy of Canopy's, such as wa"
            )
        if field in _IN_MEMORY and not server_args.enable_hierarchical_cache:
            raise CanopyError(f"{flag} needs a host tier; add --enable-hierarchical-cache")
        if field in _ON_DISK and not storage:
            raise CanopyError(
                f"{flag} needs our disk tier; add --enable-hierarchical-cache "
                "--hicache-storage-backend canopy"
            )
    if tiers.ttl_window_s is not None and not ours:
        flag = option_of(TierFlags, "ttl_window_s").flag
        raise CanopyError(f"{flag} needs --radix-eviction with a policy of Canopy's")
    if storage and not server_args.enable_hierarchical_cache:
        raise CanopyError(
            "--hicache-storage-backend canopy needs a host tier; add --enable-hierarchical-cache"
        )
    if storage:
        refusal = unsupported(DISK, server_args)
        if refusal:
            raise CanopyError(f"--hicache-storage-backend canopy: {refusal}")
    unused = [name for name in ("ttl", "host_ttl") if getattr(tiers, name) is not None]
    if unused and not server_args.enable_hierarchical_cache:
        logger.warning("the plan's %s act on tiers that this server lacks", " and ".join(unused))


def _extra_config(server_args: Any, tiers: TierOptions, ours: bool) -> dict[str, Any]:
    """The user's extra configuration, with what our options say where it says nothing."""
    extra = given_extra(server_args.hicache_storage_backend_extra_config)
    choice = tiers.disk
    if choice is None and ours:
        name, config = server_args.radix_eviction_policy, server_args.radix_eviction_policy_config
        _, options = split_config(name, config)
        options.pop("profile", None)
        choice = PolicyChoice(name, options)
    if choice is not None:
        if "policy" not in extra:
            extra["policy_config"] = extra.get("policy_config", dict(choice.config))
        extra.setdefault("policy", choice.name)
    if tiers.ttl is not None:
        extra.setdefault("ttl", tiers.ttl.to_json())
    if tiers.quotas:
        # Any user may read the server's arguments, and a tenant's name is a secret.
        extra.setdefault("quota_bytes", {_hidden(t): size for t, size in tiers.quotas.items()})
    if tiers.disk_bytes is not None and "capacity_gb" not in extra:
        extra.setdefault("capacity_bytes", tiers.disk_bytes)
    if tiers.disk_path is not None:
        extra.setdefault("path", tiers.disk_path)
    if not ours:
        # Our tree says what page each page follows; for another's, SGLang has to.
        extra.setdefault("hicache_storage_pass_prefix_keys", True)
    StorageSettings.from_extra(extra)  # a mistake is found here, not when the model is loaded
    return {**extra, **DYNAMIC_BACKEND}


def _hidden(tenant: str) -> str:
    return tenant if tenant == OTHERS or tenant.startswith("#") else tenant_digest(tenant)


def given_extra(text: str | None) -> dict[str, Any]:
    """SGLang's extra configuration of the storage, JSON or ``@FILE.json``, as an object."""
    flag = "--hicache-storage-backend-extra-config"
    if not text:
        return {}
    if text.startswith("@") and not text.endswith(".json"):
        raise CanopyError(f"{flag}: with the backend 'canopy', give JSON or a file @NAME.json")
    try:
        if text.startswith("@"):
            with open(text[1:], encoding="utf-8") as file:
                text = file.read()
        given = json.loads(text)
    except (OSError, ValueError) as error:
        raise CanopyError(f"{flag}: {error}") from None
    if not isinstance(given, dict):
        raise CanopyError(f"{flag} must be a JSON object, got {text:.60}")
    return given
