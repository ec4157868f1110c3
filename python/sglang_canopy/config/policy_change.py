"""The body of ``POST /canopy/policy``: a change of policies on a running server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_canopy.config.tiers import TREE_KEYS, PolicyChoice
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import live_names, make_policy

MADE_AT_START = (*TREE_KEYS, "profile")
"""Policy options that require a restart."""
MAX_BYTES = 16384
_KEYS = ("device", "device_config", "host", "host_config")


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """New policies for the device and the host."""

    device: PolicyChoice
    host: PolicyChoice | None = None
    """``None``: the device's policy, with its learnt state."""

    def message(self) -> str:
        """Return the text of the message to the schedulers."""
        host = self.host
        body: dict[str, Any] = {"device": self.device.name, "device_config": self.device.config}
        if host is not None:
            body |= {"host": host.name, "host_config": host.config}
        return json.dumps(body)


def change_of(body: Any) -> PolicyChange:
    """Parse the change in a body. Raises ``CanopyError`` naming the error."""
    if not isinstance(body, Mapping) or not isinstance(body.get("device"), str):
        raise CanopyError('a change of policy is a JSON object, such as {"device": "canopy-lru"}')
    unknown = sorted(map(str, body.keys() - set(_KEYS)))
    if unknown:
        raise CanopyError(f"unknown key {unknown[0][:60]!r}; allowed: {', '.join(_KEYS)}")
    if body.get("host") is None and body.get("host_config") is not None:
        raise CanopyError("host_config needs host: say which policy the options are for")
    device = _choice("device", body)
    return PolicyChange(
        device,
        None if body.get("host") is None else _choice("host", body),
    )


def unpacked(text: str) -> PolicyChange | None:
    """Parse the change of ``PolicyChange.message``; ``None`` for any other text."""
    try:
        return change_of(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _choice(tier: str, body: Mapping[str, Any]) -> PolicyChoice:
    name, config = body[tier], body.get(f"{tier}_config") or {}
    if name not in live_names():
        raise CanopyError(f"{tier} must be one of {', '.join(live_names())}, got {name!r:.60}")
    if not isinstance(config, Mapping):
        raise CanopyError(f"{tier}_config must be a JSON object, got {config!r:.60}")
    for key in MADE_AT_START:
        if key in config:
            raise CanopyError(f"{tier}_config: key {key!r} cannot change while a server runs")
    policy = make_policy(name, config)
    if getattr(policy.config, "caching", None) == "optional":
        raise CanopyError(f"{tier}_config: key 'caching' must be 'forced' on a server")
    return PolicyChoice(name, dict(config))
