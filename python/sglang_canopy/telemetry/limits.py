"""Tenants at a limit, and hints that are no longer applied. No row names a tenant."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from sglang_canopy.records import CLIENT, GATEWAY
from sglang_canopy.tenant import AT_LIMIT_SHARE


def hint_rows(model: Any) -> list[dict[str, Any]]:
    """Return the number of tenants with applied and ignored hints, by kind of hint and source.
    ``model``: the policy's reuse model; ``None`` for a policy that does not learn."""
    if model is None:
        return []
    counts = model.hints.applied_hints()
    combinations = product(("over", "return"), (CLIENT, GATEWAY), (True, False))
    return [
        {
            "hint": hint,
            "source": source,
            "applied": applied,
            "tenants": counts[hint, source, applied],
        }
        for hint, source, applied in combinations
    ]


def count_at_limits(
    keep: Mapping[str, Any], disk: Mapping[str, Any] | None
) -> dict[str, dict[str, int]]:
    """Return the tenants at each limit, and the refusals. The arguments are parts of a status."""
    limit_tokens = keep["tenant_limit_tokens"]
    keeping_tenants = sum(
        tenant["tokens"] >= AT_LIMIT_SHARE * limit_tokens > 0 for tenant in keep["tenants"]
    )
    at_limits = {"keep": {"tenants": keeping_tenants, "refused": keep["refused"]}}
    if disk is not None:
        at_limits["quota"] = {
            "tenants": disk["tenants_at_quota"],
            "refused": disk["refused_pages"].get("quota", 0),
        }
    return at_limits
