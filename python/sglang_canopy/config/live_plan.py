"""Which of a plan a server takes while it runs, and what ``POST /canopy/plan`` asks for.

Policies of the device and the host, TTLs, and the disk's capacity can change. Pools, the page size
and SGLang's own settings are made when a server starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sglang_canopy.config.plan_file import VERSION, ServerPlan
from sglang_canopy.config.policy_change import MADE_AT_START, PolicyChange, change_of
from sglang_canopy.config.tiers import PolicyChoice
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import live_names

KEY = "canopy_plan:"
"""How a message's key begins in ``SetInternalStateReq.server_args``; JSON follows."""
MAX_BYTES = 1 << 18
POLICIES = ("radix_eviction", "radix_eviction_config", "host_eviction", "host_eviction_config")
CHANGEABLE = (*POLICIES, "disk_bytes", "ttl", "host_ttl")
"""Keys of a plan file that a running server takes."""


def part_of(body: Any) -> ServerPlan:
    """The plan that a body asks for: keys of a plan file, those of ``CHANGEABLE`` only.

    Raises ``CanopyError`` naming the key that is wrong or needs a new start.
    """
    if not isinstance(body, Mapping):
        raise CanopyError(
            'a change is a JSON object of a plan file\'s keys, such as {"ttl": {...}}'
        )
    for key in body:
        if key not in (*CHANGEABLE, "version"):
            raise CanopyError(
                f"{key!r:.60} cannot change while a server runs; these can: {', '.join(CHANGEABLE)}"
            )
    plan = ServerPlan.from_json({"version": VERSION, **body})
    plan.check_for_server()
    if not any(getattr(plan, key) for key in CHANGEABLE):
        raise CanopyError(f"nothing to change; give one or more of: {', '.join(CHANGEABLE)}")
    if plan.host_eviction is not None and plan.radix_eviction is None:
        raise CanopyError("host_eviction needs radix_eviction: both are exchanged together")
    exchange_of(plan)
    return plan


def exchange_of(plan: ServerPlan) -> PolicyChange | None:
    """The exchange of policies that ``plan`` asks for. Raises ``CanopyError``."""
    if plan.radix_eviction is None:
        return None
    body = {"device": plan.radix_eviction, "device_config": dict(plan.radix_eviction_config)}
    if plan.host_eviction is not None:
        body |= {
            "host": live_name(plan.host_eviction),
            "host_config": dict(plan.host_eviction_config),
        }
    return change_of(body)


def policies_in_plan(device: PolicyChoice, host: PolicyChoice | None) -> dict[str, Any]:
    """As a plan file says them, without what cannot change; ``host`` ``None``: the device's."""
    found: dict[str, Any] = {"radix_eviction": live_name(device.name)}
    tiers = {"radix": device} if host is None else {"radix": device, "host": host}
    for tier, choice in tiers.items():
        found[f"{tier}_eviction"] = live_name(choice.name)
        config = {k: v for k, v in choice.config.items() if k not in MADE_AT_START}
        if config:
            found[f"{tier}_eviction_config"] = config
    return found


def message(answer: str, plan: ServerPlan | None) -> str:
    """The key that carries a change to the schedulers, or only asks what is in force. ``answer``:
    under which name they leave what was in force before."""
    return KEY + json.dumps({"answer": answer, "plan": None if plan is None else plan.to_json()})


def unpacked(key: str) -> tuple[str, ServerPlan | None] | None:
    """What ``message`` packed; ``None`` for anything else."""
    try:
        body = json.loads(key.removeprefix(KEY))
        name, plan = body["answer"], body["plan"]
        if not isinstance(name, str) or not name.isalnum():
            return None
        return name, None if plan is None else part_of(plan)
    except (ValueError, RecursionError, KeyError, TypeError):
        return None


def live_name(policy: str) -> str:
    """The server's name of a policy that a plan or an option names: SGLang keeps ``lru`` and others
    for its own code."""
    return policy if policy in live_names() else f"canopy-{policy}"
