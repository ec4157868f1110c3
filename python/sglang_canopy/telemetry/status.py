"""Status of one rank's cache as plain data, for ``/canopy/status`` and Prometheus."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sglang_canopy import releases
from sglang_canopy.admission.agents import AFTER_TOOL_SUFFIX, SWIFT_S
from sglang_canopy.policy.registry import config_of
from sglang_canopy.private_file import SET_ASIDE_COUNTS
from sglang_canopy.radix.counters import DEVICE, DISK, HOST, REASONS, REFUSALS, TIERS
from sglang_canopy.reuse.survival import AGE_EDGES_S, age_bin
from sglang_canopy.telemetry.holdings import Holdings
from sglang_canopy.telemetry.limits import count_at_limits, hint_rows
from sglang_canopy.telemetry.window import MINUTE_S, POINT_S, Sums, Window
from sglang_canopy.tenant import shown_tenant
from sglang_canopy.ttl.table import RESIDUAL

if TYPE_CHECKING:
    from sglang_canopy.admission.gate import SessionGate
    from sglang_canopy.radix.cache import CanopyRadixCache
    from sglang_canopy.radix.counters import CategoryCounts, Counters

MAX_CURVES = 6
"""Largest number of categories whose curves are reported."""
MAX_GROUPS = 64
"""Largest number of groups reported per tier, the first of the table."""


class StatusCollector:
    """Collects the status of one cache. All calls come from one thread other than the scheduler's.
    ``pause`` is called between slices of work to let other threads run (``time.sleep``), so that no
    slice delays the scheduler."""

    def __init__(self, cache: CanopyRadixCache, rank: int) -> None:
        self.cache = cache
        self.rank = rank
        self.counters = cache.tree_core.live.counters
        self.last_minutes, self.last_hour = Window(POINT_S), Window(MINUTE_S)
        self.started_unix_s = time.time()
        self.holdings = Holdings(cache)
        self._next_count_s = -math.inf
        self._in_use_since_s: float | None = None

    def collect(self, now: float, pause: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Return the whole status as JSON data. ``now``: seconds on a monotonic clock."""
        categories = self.counters.all_counts()
        hit_tokens = [
            sum(counts.tiers[tier].hit_tokens for counts in categories)
            for tier in range(len(TIERS))
        ]
        prompt_tokens = sum(counts.prompt_tokens for counts in categories)
        tier_sums = {"prompt_tokens": prompt_tokens, "hit_tokens": dict(zip(TIERS, hit_tokens))}
        self.last_minutes.add(now, time.time(), tier_sums)
        self.last_hour.add(now, time.time(), self._hour_sums(categories, prompt_tokens, hit_tokens))
        if now >= self._next_count_s:
            self.holdings.count(pause)
            # The count takes at most half a percent of the time.
            self._next_count_s = now + max(POINT_S, 200 * self.holdings.count_cpu_s)
        last_minute = self.last_minutes.over_last(MINUTE_S)
        disk = self._disk_status()
        keep = self.cache.tree_core.protected.keeps.stats()
        if self._in_use_since_s is None and len(self.cache.tree_core._node_arena) > 1:
            self._in_use_since_s = now
        if self._in_use_since_s is not None and now >= self._in_use_since_s + POINT_S:
            releases.record_uncalled_hooks()
        return {
            "rank": self.rank,
            "off": dict(releases.SWITCHED_OFF),
            "time_unix_s": time.time(),
            "uptime_s": time.time() - self.started_unix_s,
            "policies": self._policies(disk),
            "running": self.cache.tree_core.live.ranking_policy_name,
            "running_config": config_of(self.cache.tree_core.live.device_policy),
            "page_tokens": self.cache.tree_core.page_size,
            "kv_bytes_per_token": self.kv_bytes_per_token(),
            "nodes": len(self.cache.tree_core._node_arena),
            "prompt_tokens": prompt_tokens,
            "refused_requests": dict(zip(REFUSALS, self.counters.refusal_counts)),
            "prompt_tokens_last_minute": last_minute["prompt_tokens"],
            "hour": [*self.last_hour.points(), *self.last_hour.since_last_point()],
            "tenants": self._largest_tenants(),
            "curves": self._curves(),
            "tiers": self._tiers(categories, hit_tokens, last_minute["hit_tokens"], disk),
            "categories": [self._describe_category(counts) for counts in categories],
            "groups": list(self._groups()),
            "keep": keep,
            "limits": count_at_limits(keep, disk),
            "hints": hint_rows(getattr(self.cache.tree_core.live.learner, "model", None)),
            "awaited": self.cache.tree_core.protected.awaited.budget.stats(),
            "disk": disk,
            "storage_holds": self.cache.storage_holds.stats(),
            "session_gate": self._gate_status(now),
            "agents": self._agent_signs(categories),
            "queue": self._queue_status(),
            "missed": self.cache.tree_core.missed.stats(),
            "whatif": self._meter_status(),
            "agreement": agreement(self.counters, self.session_gate()),
            "files_set_aside": dict(SET_ASIDE_COUNTS),
        }

    def _tiers(
        self,
        categories: Sequence[CategoryCounts],
        hit_tokens: Sequence[int],
        minute_hit_tokens: Mapping[str, int],
        disk: dict[str, Any] | None,
    ) -> dict[str, dict[str, Any]]:
        """Return sizes and counts of each existing tier. ``hit_tokens``: one number per tier."""
        tiers = {}
        for name, sizes in self._tier_sizes(disk).items():
            tier = TIERS.index(name)
            tier_counts = [counts.tiers[tier] for counts in categories]
            tiers[name] = {
                **sizes,
                "hit_tokens": hit_tokens[tier],
                "hit_tokens_last_minute": minute_hit_tokens[name],
                "entered_tokens": sum(counts.entered_tokens for counts in tier_counts),
                "demoted_tokens": sum(counts.demoted_tokens for counts in tier_counts),
                "evicted_tokens": {
                    reason: sum(counts.evicted_tokens[i] for counts in tier_counts)
                    for i, reason in enumerate(REASONS)
                },
            }
        if disk is not None:  # the disk store has its own counts, in pages
            page_tokens = self.cache.tree_core.page_size
            evicted_pages = disk["evicted_pages"].items()
            tiers[TIERS[DISK]] |= {
                "entered_tokens": disk["written_pages"] * page_tokens,
                "evicted_tokens": {reason: pages * page_tokens for reason, pages in evicted_pages},
            }
        return tiers

    def _hour_sums(
        self, categories: Sequence[CategoryCounts], prompt_tokens: int, hit_tokens: Sequence[int]
    ) -> Sums:
        tiers = list(self._tier_sizes(None))
        evicted = {
            reason: sum(counts.tiers[DEVICE].evicted_tokens[i] for counts in categories)
            for i, reason in enumerate(REASONS)
        }
        hit_tokens_by_tier = {name: hit_tokens[TIERS.index(name)] for name in tiers}
        hits = {"prompt_tokens": prompt_tokens, "hit_tokens": hit_tokens_by_tier}
        return {**hits, "evicted_tokens": evicted}

    def _largest_tenants(self) -> list[dict[str, Any]]:
        """Return the tenants with most tokens on all tiers, by their shown names."""
        largest = self.holdings.largest_tenants()
        return [{"tenant": shown_tenant(tenant), **tokens} for tenant, tokens in largest]

    def _curves(self) -> dict[str, list[tuple[float, float]]]:
        """Return survival by age of the categories with most samples, if the policy learns."""
        model = getattr(self.cache.tree_core.live.learner, "model", None)
        if model is None:
            return {}
        # The scheduler's thread may add a category concurrently: copy in one step.
        categories = tuple(model.categories)
        fitted = [category for category in categories if category.all_events and category.curve]
        fitted.sort(key=lambda category: -sum(category.all_events))
        ages_s = [round(age_s, 2) for age_s in AGE_EDGES_S]
        return {
            category.label: list(zip(ages_s, (round(survival, 4) for survival in category.curve)))
            for category in fitted[:MAX_CURVES]
        }

    def kv_bytes_per_token(self) -> float:
        """Return the bytes of one token's KV on this rank."""
        allocator = self.cache.token_to_kv_pool_allocator
        kv_bytes = allocator.get_kvcache().get_kv_size_bytes()
        pool_bytes = sum(kv_bytes) if isinstance(kv_bytes, tuple) else kv_bytes
        return pool_bytes / (allocator.size + allocator.page_size)

    def _groups(self) -> Iterator[dict[str, Any]]:
        """Yield the TTL of each subtree group, by tier; ``None`` never expires."""
        groups = self.cache.tree_core.groups
        for tier, table in ((HOST, groups.host_table), (DISK, groups.disk_table)):
            if table is None:
                continue
            for i, group in enumerate(table.groups[:MAX_GROUPS]):
                held_tokens = self.holdings.group_tokens(tier, i)
                yield _describe_group(tier, str(i), group.name, group.ttl_s, held_tokens)
            for category, ttl_s in list(table.categories.items())[:MAX_GROUPS]:
                yield _describe_group(tier, f"category {category}", category, ttl_s)
            held_tokens = self.holdings.group_tokens(tier, RESIDUAL)
            yield _describe_group(
                tier, "residual", "every other prefix", table.residual_ttl_s, held_tokens
            )

    def _policies(self, disk: dict[str, Any] | None) -> dict[str, str]:
        """Return each tier's policy by its name in flags."""
        live, controller = self.cache.tree_core.live, self.cache.cache_controller
        names = {TIERS[DEVICE]: live.ranking_policy_name}
        if controller is not None:
            host = live.tiers.host
            names[TIERS[HOST]] = live.ranking_policy_name if host is None else host.name
            if controller.enable_storage:
                backend = type(controller.storage_backend).__name__
                names[TIERS[DISK]] = disk["policy"] if disk is not None else backend
        return names

    def _gate_status(self, now: float) -> dict[str, Any] | None:
        """Return the session gate's counts; ``None`` without a gate. ``clock_ago_s``: age of the last
        time that the gate received, from a request or a tick."""
        gate = self.session_gate()
        if gate is None:
            return None
        return {**gate.stats(), "clock_ago_s": round(max(0.0, now - gate.now), 3)}

    def _agent_signs(self, categories: Sequence[CategoryCounts]) -> dict[str, int]:
        """Return the agents' answers (``recognised``) and the turns that returned, as the gate counted
        them. Without a gate: tools' results and swift turns, and the returns in the policy's model."""
        gate, learner = self.session_gate(), self.cache.tree_core.live.learner
        model = getattr(learner, "model", None) if gate is None else gate.model
        returns_by_age = model.categories.root.all_events[:] if model is not None else []
        if gate is not None:
            recognised = gate.agents.agent_answers
        else:
            results = (
                counts.requests
                for counts in categories
                if counts.category.endswith(AFTER_TOOL_SUFFIX)
            )
            recognised = sum(results) + round(sum(returns_by_age[: age_bin(SWIFT_S)]))
        return {"recognised": recognised, "returns": round(sum(returns_by_age))}

    def _meter_status(self) -> dict[str, Any] | None:
        """Return the what-if meter's results; ``None`` without a meter."""
        meter = self.cache.tree_core.live.meter
        return None if meter is None else meter.stats()

    def _queue_status(self) -> dict[str, Any] | None:
        """Return the queue's order and counts; ``None`` for a cache without a scheduler's queue."""
        admission = getattr(self.cache, "admission", None)
        return None if admission is None else admission.order.status()

    def session_gate(self) -> SessionGate | None:
        return getattr(getattr(self.cache, "admission", None), "gate", None)

    def _disk_status(self) -> dict[str, Any] | None:
        """Return the status of Canopy's storage backend; ``None`` for any other backend."""
        controller = self.cache.cache_controller
        backend = controller.storage_backend if controller is not None else None
        status = getattr(backend, "status", None)
        return status() if callable(status) else None

    def _tier_sizes(self, disk: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
        """Return capacity and use of each tier, in bytes on this rank; ``None`` if unknown."""
        allocator = self.cache.token_to_kv_pool_allocator
        token_bytes = self.kv_bytes_per_token()
        sizes = {TIERS[DEVICE]: _tier_size(allocator.size, allocator.available_size(), token_bytes)}
        controller = self.cache.cache_controller
        if controller is not None:
            pool = controller.mem_pool_host
            sizes[TIERS[HOST]] = _tier_size(pool.size, pool.available_size(), pool.size_per_token)
            if controller.enable_storage:
                keys = ("capacity_bytes", "used_bytes")
                sizes[TIERS[DISK]] = {key: disk[key] if disk else None for key in keys}
        return sizes

    def _describe_category(self, counts: CategoryCounts) -> dict[str, Any]:
        return {
            "category": counts.category,
            "requests": counts.requests,
            "prompt_tokens": counts.prompt_tokens,
            "miss_tokens": counts.missed_tokens,
            "hit_tokens": {name: counts.tiers[i].hit_tokens for i, name in enumerate(TIERS)},
            "evicted_tokens": {
                name: sum(counts.tiers[i].evicted_tokens) for i, name in enumerate(TIERS)
            },
            "held_tokens": self.holdings.category_tokens(counts.category),
        }


def agreement(counters: Counters, gate: SessionGate | None = None) -> dict[str, Any]:
    """Return values that must be equal on all tensor-parallel ranks after equally many evictions
    (and admitted sessions)."""
    count, digest = counters.victim_digest.count_and_digest
    gate_counts = {} if gate is None else asdict(gate.counts)
    return {
        "victims": count,
        "victims_digest": f"{digest:016x}",
        "records_compared": counters.records_compared,
        "records_disagreed": counters.records_disagreed,
        **{f"gate_{name}": value for name, value in gate_counts.items()},
    }


def _describe_group(
    tier: int, group: str, name: str, ttl_s: float, held_tokens: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Return a group's entry. ``held_tokens``: by tier; ``None`` if not counted."""
    return {
        "tier": TIERS[tier],
        "group": group,
        "name": name,
        "ttl_s": None if math.isinf(ttl_s) else ttl_s,
        "held_tokens": held_tokens,
    }


def _tier_size(capacity_tokens: int, free_tokens: int, token_bytes: float) -> dict[str, Any]:
    return {
        "capacity_bytes": capacity_tokens * token_bytes,
        "used_bytes": (capacity_tokens - free_tokens) * token_bytes,
    }
