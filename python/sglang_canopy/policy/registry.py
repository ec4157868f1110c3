"""Registry of eviction policies by user-visible name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from sglang_canopy import declared
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import Policy

SGLANGS_LRU = "lru"
"""SGLang's own LRU, which evicts whole nodes; simulated by Canopy's LRU with ``whole_nodes``."""
CANOPYS_LRU = "canopy-lru"

_SERVED = {
    "wa": ("wa", "sglang_canopy.policy.wa"),
    "lru": (CANOPYS_LRU, "sglang_canopy.policy.lru"),
    "threshold-lru": ("threshold-lru", "sglang_canopy.policy.threshold_lru"),
    "canopy-tlru": ("canopy-tlru", "sglang_canopy.policy.canopy_tlru"),
    "etlru": ("etlru", "sglang_canopy.policy.etlru"),
}
"""Class name -> user's name and module. For users, ``lru`` is SGLang's own LRU and ``canopy-lru``
is Canopy's, in every command, flag and file."""

_SIMULATED = {
    "lfu": "canopy_lab.sim.policies.lfu",
    "fifo": "canopy_lab.sim.policies.fifo",
    "sglang-tlru": "canopy_lab.sim.policies.sglang_tlru",
}
"""Policies for comparison, in the simulator only."""

AUTO = "auto"
"""Accepted by ``--radix-eviction`` in addition to the policies' names (``config/auto.py``)."""

_MODULE_BY_CLASS = {**{name: module for name, (_, module) in _SERVED.items()}, **_SIMULATED}
_CLASS_NAMES = {live_name: name for name, (live_name, _) in _SERVED.items()}
"""User's name of a served policy -> class name."""


def policy_names() -> tuple[str, ...]:
    return tuple(_MODULE_BY_CLASS)


def simulated_names() -> tuple[str, ...]:
    """Return the users' names of the online policies, for ``canopy simulate --policy``."""
    return (SGLANGS_LRU, *_CLASS_NAMES, *_SIMULATED)


def live_names() -> tuple[str, ...]:
    """Return the names that Canopy adds to ``--radix-eviction-policy``."""
    return tuple(_CLASS_NAMES)


def live_name(class_name: str) -> str:
    """Return the user's name of a policy's class."""
    return _SERVED[class_name][0] if class_name in _SERVED else class_name


def check_served(name: str) -> None:
    """Raise ``CanopyError`` unless ``name`` is the user's name of a policy that servers run."""
    if name not in _CLASS_NAMES:
        raise CanopyError(f"unknown policy {name!r:.60}; choose one of: {', '.join(_CLASS_NAMES)}")


def policy_class(name: str) -> type[Policy]:
    """Return the class of policy ``name``. Raises ``CanopyError`` for an unknown name."""
    class_name = _CLASS_NAMES.get(name, name)
    if class_name not in _MODULE_BY_CLASS:
        raise CanopyError(
            f"unknown eviction policy {name!r}; choose one of: {', '.join(policy_names())}"
        )
    policy_type: type[Policy] = importlib.import_module(_MODULE_BY_CLASS[class_name]).POLICY
    return policy_type


def make_policy(name: str, config: Mapping[str, Any] | None = None) -> Policy:
    """Build a policy from its name and its JSON options. Raises ``CanopyError`` naming the policy, the
    invalid key and the allowed keys."""
    policy_type = policy_class(name)
    return policy_type(parse_config(name, policy_type.Config, config or {}))


def config_of(policy: Policy) -> dict[str, Any]:
    """Return the options of a policy for ``make_policy``."""
    fields = getattr(type(policy.config), "__dataclass_fields__", {})
    return {name: getattr(policy.config, name) for name in fields}


def parse_config(policy_name: str, config_class: type, values: Mapping[str, Any]) -> Any:
    """Parse a JSON object into a policy's ``Config``. Raises ``CanopyError`` naming the policy."""
    try:
        return declared.make(config_class, values)
    except CanopyError as error:
        raise CanopyError(f"policy {policy_name!r}: {error}") from None
