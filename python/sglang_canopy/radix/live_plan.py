"""What of a plan is in force on a tree in use, and a change of it."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from sglang_canopy.config.live_plan import exchange_of, policies_in_plan
from sglang_canopy.config.plan_file import ServerPlan
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.canary import Canary
from sglang_canopy.ttl.table import TTLTable

if TYPE_CHECKING:
    from sglang_canopy.radix.core import CanopyTreeCore

logger = logging.getLogger(__name__)

WHY = "POST /canopy/plan"


def in_force(core: CanopyTreeCore) -> dict[str, Any]:
    """The keys of a plan file that can change, as they are now, in full: to be sent back as they
    are when a change is to be undone. Without those of tiers that the server lacks."""
    live = core.live
    found = policies_in_plan(live.chosen, live.chosen_host)
    if not live.host_tokens:
        found.pop("host_eviction", None)
        found.pop("host_eviction_config", None)
    else:
        found["host_ttl"] = (core.groups.host or TTLTable()).to_json()
    capacity, table = core.disk.capacity(), core.disk.ttl()
    if capacity is not None and table is not None:
        found["disk_bytes"] = capacity[0]
        found["ttl"] = table.to_json()
    return found


def change(core: CanopyTreeCore, plan: ServerPlan) -> None:
    """Let ``plan`` be in force from now on, whole or not at all. Call it between two requests, at
    the same one on every rank. Raises ``CanopyError`` where this server cannot take it."""
    _refuse(core, plan)
    now = ServerPlan.from_json({"version": 1, **in_force(core)})
    asked = exchange_of(plan)
    if asked is not None and asked != exchange_of(now):
        core.exchange.apply(asked, WHY)
    if plan.ttl is not None and plan.ttl != now.ttl:
        core.groups.replace_disk_table(plan.ttl, core._node_arena.values())
        core.disk.set_ttl(plan.ttl)
        logger.info("canopy: other TTLs on the disk (%s)", WHY)
    if plan.host_ttl is not None and plan.host_ttl != now.host_ttl:
        core.groups.replace_host_table(plan.host_ttl, core._node_arena.values())
        core.live.tiers = dataclasses.replace(core.live.tiers, host_ttl=plan.host_ttl)
        core.evictable_host_leaves.set_ttl(plan.host_ttl)
        logger.info("canopy: other TTLs on the host (%s)", WHY)
    if plan.disk_bytes is not None and plan.disk_bytes != now.disk_bytes:
        core.disk.set_capacity(plan.disk_bytes)
        logger.info("canopy: %d bytes on disk instead of %s (%s)", plan.disk_bytes, now.disk_bytes, WHY)  # fmt: skip


def _refuse(core: CanopyTreeCore, plan: ServerPlan) -> None:
    live = core.live
    if plan.radix_eviction is not None and isinstance(live.device_policy, Canary):
        raise CanopyError(
            "a trial of another policy runs for some tenants; end it first "
            f'(POST /canopy/policy {{"device": "{live.running}"}})'
        )
    if not live.host_tokens and (plan.host_ttl is not None or plan.host_eviction is not None):
        raise CanopyError("this server has no host tier; start it with --enable-hierarchical-cache")
    capacity = core.disk.capacity()
    if capacity is None and (plan.disk_bytes is not None or plan.ttl is not None):
        raise CanopyError(
            "this server has no disk tier of Canopy's; start it with "
            "--hicache-storage-backend canopy"
        )
    if plan.ttl is not None and core.ttl_window is not None:
        raise CanopyError("the disk's TTLs follow the traffic on this server (--canopy-ttl-window)")
    page = 0 if capacity is None else round(capacity[1] * core.page_size)
    if plan.disk_bytes is not None and plan.disk_bytes < page:
        raise CanopyError(f"disk_bytes {plan.disk_bytes} holds no page of {page} bytes; give more")
    for name in ("ttl", "host_ttl"):
        table = getattr(plan, name)
        if table is not None and table.groups and table.block_tokens != live.settings.block_tokens:
            raise CanopyError(
                f"the groups of {name!r} are of blocks of {table.block_tokens} tokens, this "
                f"server's have {live.settings.block_tokens}; make the plan again"
            )
