"""Every eviction policy by the name a user types."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from sglang_canopy import declared
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import Policy

_MODULES = {
    "wa": "wa",
    "lru": "lru",
    "lfu": "lfu",
    "fifo": "fifo",
    "slru": "slru",
    "s3fifo": "s3fifo",
    "gdfs": "gdfs",
    "threshold-lru": "threshold_lru",
    "sglang-tlru": "sglang_tlru",
    "canopy-tlru": "canopy_tlru",
    "etlru": "etlru",
}

_SGLANGS_OWN = ("lru", "lfu", "fifo", "slru")


def policy_names() -> tuple[str, ...]:
    """Names of the online policies, as ``canopy simulate --policy`` takes them."""
    return tuple(_MODULES)


def live_names() -> tuple[str, ...]:
    """Names Canopy adds to ``--radix-eviction-policy``.

    Where SGLang has a policy of the same name, ours is ``canopy-NAME``: SGLang's own names
    keep meaning SGLang's own code.
    """
    return tuple(f"canopy-{n}" if n in _SGLANGS_OWN else n for n in _MODULES)


def _base_name(name: str) -> str:
    short = name.removeprefix("canopy-")
    return short if short in _SGLANGS_OWN else name


def policy_class(name: str) -> type[Policy]:
    """The class of the policy called ``name``. Raises ``CanopyError`` for an unknown one."""
    base = _base_name(name)
    if base not in _MODULES:
        raise CanopyError(
            f"unknown eviction policy {name!r}; choose one of: {', '.join(policy_names())}"
        )
    module = importlib.import_module(f"sglang_canopy.policy.{_MODULES[base]}")
    made: type[Policy] = module.POLICY
    return made


def make_policy(name: str, config: Mapping[str, Any] | None = None) -> Policy:
    """Build a policy from its name and its JSON options.

    Raises ``CanopyError`` naming the policy, the offending key and the allowed keys.
    """
    made = policy_class(name)
    return made(parse_config(name, made.Config, config or {}))


def parse_config(policy: str, cls: type, given: Mapping[str, Any]) -> Any:
    """Turn a JSON object into ``cls``, a policy's ``Config``. Raises ``CanopyError`` by name."""
    try:
        return declared.make(cls, given)
    except CanopyError as error:
        raise CanopyError(f"policy {policy!r}: {error}") from None
