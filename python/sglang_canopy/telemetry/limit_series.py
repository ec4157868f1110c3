"""Series of tenants at a limit, and of hints no longer applied. No label names a tenant."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from sglang_canopy.records import CLIENT, GATEWAY, INFERRED
from sglang_canopy.telemetry.metric import reported
from sglang_canopy.tenant import AT_LIMIT

METRICS = (
    reported(
        "tenants_at_limit",
        "limits.{limit}.tenants",
        "tenants that use 95 % of a limit: of their disk quota (`quota`), of kept paths (`keep`)",
    ),
    reported(
        "limit_refusals_total",
        "limits.{limit}.refused",
        "pages refused by the disk (`quota`), and refused keeps, because a limit of one tenant or of "
        "all tenants was reached",
    ),
    reported(
        "hint_tenants",
        "hints[said,source,heeded].tenants",
        "tenants that hinted when a conversation continues (`return`) or that it is over (`over`), by "
        "source, and whether such hints were right often enough to be applied (`yes`, `no`); of the 64 "
        "tenants that hinted last",
    ),
)


def hint_rows(model: Any) -> list[dict[str, Any]]:
    """Return the number of tenants with applied and ignored hints, by kind of hint and source.

    ``model``: the policy's reuse model; ``None`` for a policy that does not learn.
    """
    if model is None:
        return []
    counts = model.hints.applied_hints()
    rows = product(("over", "return"), (CLIENT, GATEWAY, INFERRED), (True, False))
    return [
        {"said": hint, "source": source, "heeded": acts, "tenants": counts[hint, source, acts]}
        for hint, source, acts in rows
    ]


def limits(keep: Mapping[str, Any], disk: Mapping[str, Any] | None) -> dict[str, dict[str, int]]:
    """Return the tenants at each limit, and the refusals. The arguments are parts of a status."""
    at_limits = {"keep": {"tenants": _at(keep["tenants"], "tokens", keep["tenant_limit_tokens"]),
                      "refused": keep["refused"]}}  # fmt: skip
    if disk is not None:
        at_limits["quota"] = {
            "tenants": disk["tenants_at_quota"],
            "refused": disk["refused_pages"].get("quota", 0),
        }
    return at_limits


def _at(rows: list[dict[str, Any]], what: str, limit: int) -> int:
    return sum(row[what] >= AT_LIMIT * limit > 0 for row in rows)
