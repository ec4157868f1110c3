"""Convert the chosen configuration to the file that ``--canopy-plan`` takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_canopy.config.plan_file import ServerPlan
from sglang_canopy.plan.choice import configuration_of
from sglang_canopy.plan.objective import Row
from sglang_canopy.plan.prices import GIB
from sglang_canopy.plan.space import GROUP
from sglang_canopy.plan.worker import PlanInputs
from sglang_canopy.policy.registry import live_names
from sglang_canopy.ttl.table import SERVER_HASH, TRACE_HASH, TTLTable


def server_plan(
    row: Row, work: PlanInputs, about: Mapping[str, Any], disk_path: str | None = None
) -> ServerPlan:
    """The plan file of one server of the chosen configuration.

    Group TTLs are written only where their roots are ids that a server makes, which needs the
    server's own log; else the table keeps its residual TTL and ``made_by`` says so.
    """
    c = configuration_of(row)
    configs = work.policy_configs
    made_by = {key: value for key, value in about.items() if isinstance(value, (str, int, float))}
    made_by["instances"] = c.instances
    ttl: TTLTable | None = None
    if c.disk is not None and c.ttl == GROUP:
        ttl = work.group_table(c.disk_gib)
        if ttl.groups and ttl.hash == TRACE_HASH:
            made_by["group_ttls"] = (
                f"{len(ttl.groups)} groups of this trace left out: only a plan from the server's "
                "own log (--format sglang) has roots that a server knows"
            )
            ttl = TTLTable(residual_ttl_s=ttl.residual_ttl_s, hash=SERVER_HASH)
    elif c.disk is not None and c.ttl is not None:
        ttl = TTLTable(residual_ttl_s=float(c.ttl))
    if c.disk is not None:
        made_by["disk_class"] = c.disk
    with_host = c.dram_gib > 0
    return ServerPlan(
        radix_eviction=live_name(c.device_policy),
        radix_eviction_config=dict(configs.get(c.device_policy, {})),
        host_eviction=live_name(c.host_policy) if with_host else None,
        host_eviction_config=dict(configs.get(c.host_policy, {})) if with_host else {},
        disk_eviction=live_name(c.disk_policy) if c.disk else None,
        disk_eviction_config=dict(configs.get(c.disk_policy, {})) if c.disk else {},
        host_bytes=round(c.dram_gib * GIB) if with_host else None,
        disk_bytes=round(c.disk_gib * GIB) if c.disk else None,
        disk_path=disk_path if c.disk else None,
        ttl=ttl,
        made_by=made_by,
    )


def live_name(policy: str) -> str:
    """The server's name of a simulated policy: SGLang keeps ``lru`` and others for its own code."""
    return policy if policy in live_names() else f"canopy-{policy}"
