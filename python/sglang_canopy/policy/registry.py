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

_MODULES = {**{name: module for name, (_, module) in _SERVED.items()}, **_SIMULATED}
_LIVE = {live: name for name, (live, _) in _SERVED.items()}


def policy_names() -> tuple[str, ...]:
    return tuple(_MODULES)


def simulated_names() -> tuple[str, ...]:
    """Return the users' names of the online policies, for ``canopy simulate --policy``."""
    return (SGLANGS_LRU, *_LIVE, *_SIMULATED)


def live_names() -> tuple[str, ...]:
    """Return the names that Canopy adds to ``--radix-eviction-policy``."""
    return tuple(_LIVE)


def live_name(name: str) -> str:
    """Return the user's name of a policy's class."""
    return _SERVED[name][0] if name in _SERVED else name


def check_served(name: str) -> None:
    """Raise ``CanopyError`` unless ``name`` is the user's name of a policy that servers run."""
    if name not in _LIVE:
        raise CanopyError(f"unknown policy {name!r:.60}; choose one of: {', '.join(_LIVE)}")


def policy_class(name: str) -> type[Policy]:
    """Return the class of policy ``name``. Raises ``CanopyError`` for an unknown name."""
    base = _LIVE.get(name, name)
    if base not in _MODULES:
        raise CanopyError(
            f"unknown eviction policy {name!r}; choose one of: {', '.join(policy_names())}"
        )
    policy: type[Policy] = importlib.import_module(_MODULES[base]).POLICY
    return policy


def make_policy(name: str, config: Mapping[str, Any] | None = None) -> Policy:
    """Build a policy from its name and its JSON options. Raises ``CanopyError`` naming the policy, the
    invalid key and the allowed keys."""
    cls = policy_class(name)
    return cls(parse_config(name, cls.Config, config or {}))


def config_of(policy: Policy) -> dict[str, Any]:
    """Return the options of a policy for ``make_policy``."""
    fields = getattr(type(policy.config), "__dataclass_fields__", {})
    return {name: getattr(policy.config, name) for name in fields}


def parse_config(policy: str, cls: type, values: Mapping[str, Any]) -> Any:
    """Parse a JSON object into a policy's ``Config``. Raises ``CanopyError`` naming the policy."""
    try:
        return declared.make(cls, values)
    except CanopyError as error:
        raise CanopyError(f"policy {policy!r}: {error}") from None
