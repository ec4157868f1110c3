"""Compare a plan's prediction with a server's own log of the same requests.

The server is simulated with the settings of its configuration. TTFT, throughput (tokens/s) and hits are
compared. TTFT and hits exclude the first requests, because the simulation does not know the initial
content of the cache.

The profile's step times can be recalibrated by one factor, fitted to the mean TTFT of the first
half of the requests. The second half measures the error with that factor.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from canopy_lab.plan.server_plan import ServerFlags
from canopy_lab.plan.system import HOST_BYTES_PER_S, scheduling_fields
from canopy_lab.sim.system.config import SystemConfig, TierSpec
from canopy_lab.sim.system.engine_profile import Bandwidth, EngineProfile
from canopy_lab.sim.system.run import simulate_system
from canopy_lab.sim.system.workload import Workload
from canopy_lab.trace.record import TraceRequest
from canopy_lab.trace.served_log import ServedRequest
from sglang_canopy.config import auto
from sglang_canopy.config.server_settings import SGLANG_DEFAULTS, ServerSettings
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import AUTO, policy_names
from sglang_canopy.ttl.table import TTLTable

WARM_UP_SHARE = 0.1
TIERS = ("device", "host", "disk")
TTFTS = ("mean_ttft_s", "p50_ttft_s", "p90_ttft_s", "p99_ttft_s")
HITS = ("token_hit_ratio", *(f"{tier}_hit_ratio" for tier in TIERS))
METRICS = (*TTFTS, "throughput_tokens_per_s", *HITS)
_BISECTION_STEPS = 12
_MAX_FACTOR = 16.0
"""Limits of the recalibration factor: the inverse of this number, and the number itself."""


@dataclass(frozen=True, slots=True)
class Validation:
    """Predicted and measured values by metric. Hit ratios are of prompt tokens."""

    requests: int
    measured: Mapping[str, float]
    predicted: Mapping[str, float]

    def error(self, name: str) -> float:
        """Return the prediction error: points of hit ratio, else a share of the measured value."""
        measured, predicted = self.measured[name], self.predicted[name]
        return predicted - measured if name in HITS else predicted / max(measured, 1e-12) - 1

    def to_json(self) -> dict[str, Any]:
        names = [n for n in METRICS if n in self.measured and n in self.predicted]
        return {
            "requests": self.requests,
            "seen": {n: self.measured[n] for n in names},
            "predicted": {n: self.predicted[n] for n in names},
            "errors": {n: self.error(n) for n in names},
        }


def system_config(
    plan: ServerFlags,
    profile: EngineProfile,
    *,
    device_tokens: int | None = None,
    disk: Bandwidth | None = None,
) -> SystemConfig:
    """Return the simulator's configuration of one server that was started with ``plan``.

    ``disk``: bandwidth; ``None`` takes the profile's. Raises ``CanopyError`` if the pool size or a
    bandwidth is unknown.
    """
    settings = ServerSettings.from_flags(plan).fill_from(SGLANG_DEFAULTS)
    tokens = device_tokens or settings.max_total_tokens
    if tokens is None:
        raise CanopyError(
            "the configuration has no size of the device's KV pool; give --device-tokens (the "
            "server's log has it as max_total_num_tokens)"
        )
    host = disk_tier = None
    if plan.get("canopy-host-gb"):
        policy, options = _tier_policy(plan, "canopy-host-eviction")
        host_bandwidth = profile.host or Bandwidth(HOST_BYTES_PER_S, HOST_BYTES_PER_S)
        host = TierSpec(
            round(plan["canopy-host-gb"] * 1e9), host_bandwidth.read_bytes_per_s, host_bandwidth.write_bytes_per_s,
            policy=policy, policy_config=options,
            latency_s=host_bandwidth.latency_s, ttl=_table(plan, "canopy-host-ttl"),
        )  # fmt: skip
    disk_bytes = _disk_bytes(plan)
    if disk_bytes:
        policy, options = _tier_policy(plan, "canopy-disk-eviction")
        disk_bandwidth = disk or profile.disk
        if disk_bandwidth is None:
            raise CanopyError(
                f"profile {profile.name!r} has no disk bandwidth; give --disk-mib-per-s, or profile "
                "a server that has a disk tier"
            )
        disk_tier = TierSpec(
            disk_bytes, disk_bandwidth.read_bytes_per_s, disk_bandwidth.write_bytes_per_s,
            policy=policy, policy_config=options,
            latency_s=disk_bandwidth.latency_s, ttl=_table(plan, "canopy-ttl"),
        )  # fmt: skip
    config: Mapping[str, Any] = plan.get("radix-eviction-policy-config", {})
    tree_options = {n: config[n] for n in ("quantum_tokens", "whole_nodes") if n in config}
    return SystemConfig(
        device_tokens=int(tokens),
        device_policy=_simulated_policy(plan.get("radix-eviction")),
        device_policy_config={n: v for n, v in config.items() if n not in _TREE_KEYS},
        host=host,
        disk=disk_tier if host is not None else None,
        **scheduling_fields(settings, plan.get("radix-eviction") == AUTO),
        **tree_options,
    )


_TREE_KEYS = (
    "quantum_tokens", "whole_nodes", "block_tokens", "keep_tenant_share", "keep_total_share"
)  # fmt: skip


def validate(
    trace: Sequence[TraceRequest],
    served: Mapping[int, ServedRequest],
    config: SystemConfig,
    profile: EngineProfile,
    *,
    compared: tuple[float, float] = (WARM_UP_SHARE, 1.0),
) -> Validation:
    """Simulate ``trace`` and compare ``compared`` of it: (from, to) as shares of the requests.

    ``served`` is keyed by the requests' ``line``. Raises ``CanopyError`` if too few were served.
    """
    first, end = (round(share * len(trace)) for share in compared)
    answers = [served.get(r.line) for r in trace]
    ttft_s = np.array([s.ttft_s if s and s.ttft_s is not None else math.nan for s in answers])
    is_compared = np.isfinite(ttft_s)
    is_compared[:first] = is_compared[end:] = False
    if is_compared.sum() < 2:
        raise CanopyError(
            f"only {int(is_compared.sum())} of {len(trace)} requests have the time of their first "
            "token; give a log of more requests"
        )
    workload = Workload(trace, logged_times=True)
    result = simulate_system(workload, config, profile, arrivals=LoggedArrivals(workload, served))
    prompt_tokens = np.array([max(r.input_tokens, 1) for r in trace])
    cached_tokens = np.array([s.cached_tokens if s else 0 for s in answers])
    measured = _summarise_ttft(ttft_s[is_compared])
    predicted = _summarise_ttft(result.ttft_s[is_compared])
    compared_tokens = prompt_tokens[is_compared].sum()
    measured["token_hit_ratio"] = float(cached_tokens[is_compared].sum() / compared_tokens)
    predicted["token_hit_ratio"] = float(result.cached_tokens[is_compared].sum() / compared_tokens)
    tokens = sum(r.input_tokens + max(r.output_tokens, 1) for r in trace)
    ends_s = [r.time_s + s.e2e_s for r, s in zip(trace, answers) if s and s.e2e_s is not None]
    if ends_s:
        measured["throughput_tokens_per_s"] = tokens / max(max(ends_s) - trace[0].time_s, 1e-9)
        predicted["throughput_tokens_per_s"] = result.throughput_tokens_per_s
    hits = [s.cached_by_tier for s in answers if s is not None and s.cached_by_tier is not None]
    for tier in TIERS if hits else ():
        measured[f"{tier}_hit_ratio"] = sum(hit[tier] for hit in hits) / int(prompt_tokens.sum())
        predicted[f"{tier}_hit_ratio"] = result.token_hit_ratio_by_tier[tier]
    return Validation(int(is_compared.sum()), measured, predicted)


def recalibrate(
    trace: Sequence[TraceRequest],
    served: Mapping[int, ServedRequest],
    config: SystemConfig,
    profile: EngineProfile,
) -> tuple[float, EngineProfile, Validation]:
    """Fit a factor on step times to the mean TTFT of the first half of the requests.

    Returns the factor, the scaled profile, and its validation on the second half.
    """
    half = 0.5 * (1 + WARM_UP_SHARE)
    low, high = 1 / _MAX_FACTOR, _MAX_FACTOR
    for _ in range(_BISECTION_STEPS):
        middle = math.sqrt(low * high)
        trial = rescale(profile, middle)
        validation = validate(trace, served, config, trial, compared=(WARM_UP_SHARE, half))
        if validation.error("mean_ttft_s") > 0:
            high = middle
        else:
            low = middle
    factor = math.sqrt(low * high)
    rescaled = rescale(profile, factor)
    return factor, rescaled, validate(trace, served, config, rescaled, compared=(half, 1.0))


def rescale(profile: EngineProfile, factor: float) -> EngineProfile:
    """Return ``profile`` with every step time multiplied by ``factor``."""
    return replace(
        profile,
        prefill_linear_s=tuple(factor * s for s in profile.prefill_linear_s),
        attention_s=tuple(tuple(factor * s for s in row) for row in profile.attention_s),
        decode_step_s=tuple(tuple(factor * s for s in row) for row in profile.decode_step_s),
        prefill_request_s=factor * profile.prefill_request_s,
        notes={**profile.notes, "recalibrated": factor * profile.notes.get("recalibrated", 1.0)},
    )


def _summarise_ttft(ttft_s: np.ndarray) -> dict[str, float]:
    quantiles = np.percentile(ttft_s, (50, 90, 99))
    return dict(zip(TTFTS, (float(ttft_s.mean()), *map(float, quantiles))))


def _tier_policy(plan: ServerFlags, flag: str) -> tuple[str, dict[str, Any]]:
    """Return a tier's policy and its options; the device's if none is given."""
    setting = plan.get(flag)
    if setting is None:
        return _simulated_policy(plan.get("radix-eviction")), {}
    options = dict(setting) if isinstance(setting, Mapping) else {"policy": setting}
    return _simulated_policy(options.pop("policy")), options


def _disk_bytes(plan: ServerFlags) -> int:
    extra = plan.get("hicache-storage-backend-extra-config", {})
    return int(extra.get("capacity_bytes") or extra.get("global_segment_size") or 0)


def _table(plan: ServerFlags, flag: str) -> TTLTable | None:
    return TTLTable.from_json(plan[flag]) if flag in plan else None


def _simulated_policy(policy: str | None) -> str:
    if policy == AUTO:
        return auto.AUTO_POLICY
    name = (policy or "lru").removeprefix("canopy-")
    return name if name in policy_names() else policy or "lru"


class LoggedArrivals:
    """``Arrivals`` of a log's requests. ``served`` is keyed by the requests' ``line``."""

    def __init__(self, workload: Workload, served: Mapping[int, ServedRequest]) -> None:
        self._times_s = list(workload.times_s)
        self._following: dict[int, list[int]] = {}
        waiting: set[int] = set()
        unanswered: list[tuple[float, int]] = []
        answered_by_block: dict[int, int] = {}
        """Block -> last answered request whose prompt has it."""
        for index, record in enumerate(workload.trace):
            now_s = self._times_s[index]
            while unanswered and unanswered[0][0] <= now_s:
                _, earlier = heapq.heappop(unanswered)
                answered_by_block.update(dict.fromkeys(workload.trace[earlier].blocks, earlier))
            previous = None
            for block in record.blocks:
                if block not in answered_by_block:
                    break
                previous = answered_by_block[block]
            if previous is not None:
                self._following.setdefault(previous, []).append(index)
                waiting.add(index)
            answer = served.get(record.line)
            if answer is not None and answer.e2e_s is not None:
                heapq.heappush(unanswered, (now_s + answer.e2e_s, index))
        self._first_requests = [(t, i) for i, t in enumerate(self._times_s) if i not in waiting]

    def first_requests(self) -> Sequence[tuple[float, int]]:
        return self._first_requests

    def following_requests(self, request: int, end_s: float) -> Sequence[tuple[float, int]]:
        return [(max(self._times_s[i], end_s), i) for i in self._following.get(request, ())]
