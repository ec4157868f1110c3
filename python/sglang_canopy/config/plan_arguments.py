"""Converts a plan file to SGLang's arguments; typed arguments take precedence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sglang_canopy.config.plan_file import ServerPlan, read_plan
from sglang_canopy.config.server_settings import EXTRA_CONFIG, ServerSettings, merged_extra
from sglang_canopy.config.tiers import PLAN_FLAG
from sglang_canopy.errors import CanopyError

_ALSO = {"--enable-hierarchical-cache": ("--enable-hicache",)}
_MASTER = ("master_server_address", "client_server_address")


def arguments_of_plan(path: str, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments, and a line for each setting of the plan that ``argv`` overrules.

    Raises ``CanopyError`` if the file is not a plan, or its plan misses its limits.
    """
    try:
        plan = read_plan(path)
        plan.check_feasible()
    except CanopyError as error:
        raise CanopyError(f"{PLAN_FLAG}: {error}") from None
    added, overruled = _policies(plan, argv)
    if plan.server is not None:
        more, others = _server(plan, plan.server, argv)
        added, overruled = added + more, overruled + others
    if plan.host_bytes is not None and typed(argv, "--hicache-size", "--hicache-ratio"):
        overruled.append(f"host_bytes {plan.host_bytes}: the host pool's size was given")
    return added, overruled


def _policies(plan: ServerPlan, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    added, overruled = [], []
    if plan.radix_eviction is not None:
        if typed(argv, "--radix-eviction", "--radix-eviction-policy"):
            overruled.append(f"radix_eviction {plan.radix_eviction!r}: --radix-eviction was given")
        else:
            added += ["--radix-eviction-policy", plan.radix_eviction]
            if plan.radix_eviction_config and not typed(argv, "--radix-eviction-policy-config"):
                added += ["--radix-eviction-policy-config", json.dumps(plan.radix_eviction_config)]
    for tier in ("host", "disk"):
        name = getattr(plan, f"{tier}_eviction")
        if name is not None and typed(argv, f"--canopy-{tier}-eviction"):
            overruled.append(f"{tier}_eviction {name!r}: --canopy-{tier}-eviction was given")
    return added, overruled


def _server(
    plan: ServerPlan, settings: ServerSettings, argv: Sequence[str]
) -> tuple[list[str], list[str]]:
    added, overruled = [], []
    for flag, words in settings.arguments().items():
        if not typed(argv, flag):
            added += words
        elif words[1:] != [value(argv, flag)]:
            overruled.append(f"server: {' '.join(words)}: {flag} was given")
    given = value(argv, EXTRA_CONFIG)
    if given is not None and given.startswith("@"):
        overruled.append(f"server: {settings.extra_config()}: {EXTRA_CONFIG} names a file")
        return added, overruled
    more: dict[str, Any] = {}
    if settings.hicache_storage_backend == "mooncake" and plan.disk_bytes is not None:
        more["global_segment_size"] = plan.disk_bytes
        if given is None or not any(key in given for key in _MASTER):
            overruled.append(
                f"disk_bytes {plan.disk_bytes}: say where the store is, {EXTRA_CONFIG} "
                f"'{{\"master_server_address\": ...}}'; else SGLang reads its MOONCAKE_ variables, "
                f"of which MOONCAKE_GLOBAL_SEGMENT_SIZE is what this server lends"
            )
            return added, overruled
    if settings.hicache_storage_backend is not None and (settings.extra_config() or more):
        added += [EXTRA_CONFIG, merged_extra(given, settings, more)]
    return added, overruled


def typed(argv: Sequence[str], *flags: str) -> bool:
    """Return whether a command line contains one of ``flags``, in any spelling."""
    spelt = [spelling for flag in flags for spelling in (flag, *_ALSO.get(flag, ()))]
    return any(a == flag or a.startswith(f"{flag}=") for a in argv for flag in spelt)


def value(argv: Sequence[str], flag: str) -> str | None:
    """Return the last value typed after ``flag``, or ``None``."""
    found = None
    for at, word in enumerate(argv):
        if word == flag and at + 1 < len(argv):
            found = argv[at + 1]
        elif word.startswith(f"{flag}="):
            found = word[len(flag) + 1 :]
    return found
