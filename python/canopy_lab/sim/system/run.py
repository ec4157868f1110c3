"""Simulate a whole system over a trace: the event loop and its totals."""

from __future__ import annotations

import gc
import heapq
import math
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from canopy_lab.sim.system.arrivals import Arrivals, OpenLoop
from canopy_lab.sim.system.config import SystemConfig
from canopy_lab.sim.system.disk import Disk
from canopy_lab.sim.system.engine_profile import EngineProfile
from canopy_lab.sim.system.instance import Instance
from canopy_lab.sim.system.job import SimulatedRequest
from canopy_lab.sim.system.result import SystemResult
from canopy_lab.sim.system.routing import Router
from canopy_lab.sim.system.step_costs import StepCosts
from canopy_lab.sim.system.tier_usage import TierUsage
from canopy_lab.sim.system.workload import Workload
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.registry import make_policy

_ARRIVAL, _STEP = 0, 1
"""Event kinds. An arrival precedes the end of a step at the same time."""
_SWEEPS_PER_RUN = 256
"""Sweeps for expired pages per run."""
_OBJECTS_PER_COLLECTION = 100_000
"""New objects between two runs of Python's garbage collector."""


def simulate_system(
    trace: Iterable[TraceRequest] | Workload,
    config: SystemConfig,
    profile: EngineProfile,
    *,
    arrivals: Arrivals | None = None,
) -> SystemResult:
    """Serve ``trace`` (or a ``Workload`` made of it) on ``config``, with the costs of ``profile``.

    Deterministic. ``arrivals``: ``arrivals.py``; default: the trace's times.

    Raises ``CanopyError`` for an empty or unsorted trace, or a request that does not fit on the
    device.
    """
    start_s = time.perf_counter()
    workload = trace if isinstance(trace, Workload) else Workload(trace)
    if arrivals is None:
        arrivals = OpenLoop(workload)
    run = _SystemRun(workload, config, profile, arrivals)
    with _collect_rarely():
        run.serve()
    return run.result(time.perf_counter() - start_s)


@contextmanager
def _collect_rarely() -> Iterator[None]:
    """Run the garbage collector rarely: without cycles, it only costs a tenth of the time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(max(thresholds[0], _OBJECTS_PER_COLLECTION), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


class _SystemRun:
    """One simulation: instances, clock and sums."""

    def __init__(
        self, workload: Workload, config: SystemConfig, profile: EngineProfile, arrivals: Arrivals
    ) -> None:
        self.workload = workload
        self.config = config
        self.profile = profile
        self.arrivals = arrivals
        self.disks = _make_disks(config, profile, workload.block_tokens)
        costs = StepCosts(profile)
        self.instances = [
            Instance(
                config,
                costs,
                workload.block_tokens,
                *_make_policies(config),
                self.disks[number % len(self.disks)] if self.disks else None,
            )
            for number in range(config.instances)
        ]
        self.router = Router(config.routing, self.instances)
        self.event_heap: list[tuple[float, int, int, Any]] = []
        self.sequence = 0
        self.event_count = 0
        count = len(workload)
        self.ttft_s = array("d", [0.0]) * count
        self.e2e_s = array("d", [0.0]) * count
        self.tpot_s_sum, self.tpot_count = 0.0, 0
        self.queue_s_sum = 0.0
        self.cached_tokens = array("q", [0]) * count
        self.due_s = array("d", [0.0]) * count
        self.prompt_lengths = array("q", [0]) * count
        self.hit_tokens = {"device": 0, "host": 0, "disk": 0}
        self.saved_s = dict.fromkeys(self.hit_tokens, 0.0)
        self.costs = costs
        self.prompt_tokens = self.output_tokens = 0
        self.first_arrivals = arrivals.first_requests()
        self.start_s = self.end_s = self.first_arrivals[0][0]
        self.last_arrival_s = -math.inf
        self.tier_usage = TierUsage(
            self.instances, self.disks, profile.kv_bytes_per_token, self.end_s
        )

    def serve(self) -> None:
        """Run from the first arrival to the last token."""
        heap, first_arrivals = self.event_heap, self.first_arrivals
        count, index = len(first_arrivals), 0
        span_s = max(self.workload.times_s[-1] - self.workload.times_s[0], 1.0)
        sweep_every_s = span_s / _SWEEPS_PER_RUN if self._has_ttl() else math.inf
        next_sweep_s = self.start_s + sweep_every_s
        while index < count or heap:
            if index < count and (not heap or (first_arrivals[index][0], _ARRIVAL) <= heap[0][:2]):
                now, number = first_arrivals[index]
                index += 1
                self.event_count += 1
                self._arrive(number, now)
                continue
            now, event_kind, _, payload = heapq.heappop(heap)
            if event_kind == _ARRIVAL:
                self.event_count += 1
                self._arrive(payload, now)
                continue
            instance, version = payload
            if version != instance.plan_version:
                continue
            self.event_count += 1
            if now >= next_sweep_s:
                next_sweep_s = now + sweep_every_s
                self._sweep(now)
            self._step(instance, now)
        for instance in self.instances:
            instance.check_empty()

    def _arrive(self, number: int, now: float) -> None:
        request, path, prompt_tokens, output_tokens, end_tokens = self.workload.request(number)
        # Policies receive a request's arrival time in the simulation; no two are equal.
        self.last_arrival_s = max(now, math.nextafter(self.last_arrival_s, math.inf))
        request.time = self.last_arrival_s
        job = SimulatedRequest(number, now, request, path, prompt_tokens, output_tokens, end_tokens)
        instance = self.instances[self.router.choose(job.request.path)]
        plan_version = instance.plan_version
        instance.arrive(job, now)
        if instance.is_idle():
            self._step(instance, now)
        elif instance.plan_version != plan_version:
            self._push(instance.end_s, _STEP, (instance, instance.plan_version))

    def _step(self, instance: Instance, now: float) -> None:
        instance.advance(now)
        if instance.finished:
            for job, end_s in instance.finished:
                self._account(job, end_s)
                for due_s, following in self.arrivals.following_requests(job.index, end_s):
                    self._push(due_s, _ARRIVAL, following)
            instance.finished.clear()
        self.tier_usage.sample(now, instance)
        if instance.end_s < math.inf:
            self._push(instance.end_s, _STEP, (instance, instance.plan_version))
        elif instance.waiting_count:
            wake_s = instance.wake_at(now)
            if wake_s < math.inf:
                self._push(wake_s, _STEP, (instance, instance.plan_version))

    def _push(self, time_s: float, event_kind: int, payload: Any) -> None:
        self.sequence += 1
        heapq.heappush(self.event_heap, (time_s, event_kind, self.sequence, payload))

    def _has_ttl(self) -> bool:
        tiers = (self.config.host, self.config.disk)
        return any(tier is not None and tier.ttl is not None for tier in tiers)

    def _sweep(self, now: float) -> None:
        for instance in self.instances:
            instance.tree.expire()
        for disk in self.disks:
            disk.sweep(now)

    def _account(self, job: SimulatedRequest, end_s: float) -> None:
        index, client_s = job.index, self.profile.arrival_s
        self.ttft_s[index] = job.first_token_s - job.arrival_s + client_s
        self.e2e_s[index] = end_s - job.arrival_s + client_s
        if job.output_tokens > 1:
            self.tpot_s_sum += (end_s - job.first_token_s) / (job.output_tokens - 1)
            self.tpot_count += 1
        self.queue_s_sum += job.start_s - job.arrival_s
        self.cached_tokens[index] = job.device_hit_tokens + job.host_hit_tokens
        host_hit = job.host_hit_tokens - job.disk_hit_tokens
        hits = (job.device_hit_tokens, host_hit, job.disk_hit_tokens)
        self.due_s[index], self.prompt_lengths[index] = job.arrival_s, job.prompt_tokens
        cached_tokens, cost_s = 0, self.costs.prefill_s([(job.prompt_tokens, 0)])
        for tier, hit_tokens in zip(self.hit_tokens, hits, strict=True):
            self.hit_tokens[tier] += hit_tokens
            if hit_tokens:
                cached_tokens += hit_tokens
                uncached_tokens = job.prompt_tokens - cached_tokens
                rest_cost_s = self.costs.prefill_s([(uncached_tokens, cached_tokens)])
                self.saved_s[tier] += cost_s - rest_cost_s
                cost_s = rest_cost_s
        self.prompt_tokens += job.prompt_tokens
        self.output_tokens += job.output_tokens
        self.end_s = max(self.end_s, end_s)

    def result(self, seconds: float) -> SystemResult:
        """Return the totals as a ``SystemResult``."""
        start_s, kv_bytes = self.start_s, float(self.profile.kv_bytes_per_token)
        span_s = max(self.end_s - start_s, 1e-9)
        self.tier_usage.finish(self.end_s)
        for disk in self.disks:
            disk.channel.advance(self.end_s)
        ttft = np.frombuffer(self.ttft_s)
        e2e = np.frombuffer(self.e2e_s)
        p50, p90, p99 = (float(p) for p in np.percentile(ttft, (50, 90, 99)))
        return SystemResult(
            requests=len(ttft),
            mean_ttft_s=float(ttft.mean()),
            p50_ttft_s=p50,
            p90_ttft_s=p90,
            p99_ttft_s=p99,
            mean_tpot_s=self.tpot_s_sum / self.tpot_count if self.tpot_count else 0.0,
            mean_e2e_s=float(e2e.mean()),
            throughput_tokens_per_s=(self.prompt_tokens + self.output_tokens) / span_s,
            output_tokens_per_s=self.output_tokens / span_s,
            makespan_s=span_s,
            token_hit_ratio=sum(self.hit_tokens.values()) / self.prompt_tokens,
            token_hit_ratio_by_tier={t: n / self.prompt_tokens for t, n in self.hit_tokens.items()},
            mean_bytes_by_tier=self.tier_usage.means(span_s),
            peak_bytes_by_tier=self.tier_usage.peaks(),
            host_written_bytes=sum(i.tree.host_written_tokens for i in self.instances) * kv_bytes,
            disk_read_bytes=sum(disk.channel.read_bytes for disk in self.disks),
            disk_written_bytes=sum(disk.channel.written_bytes for disk in self.disks),
            prefill_s_saved_by_tier=self.saved_s,
            mean_queue_s=self.queue_s_sum / len(ttft),
            peak_queue_length=self.tier_usage.peak_queue_length,
            busy_share=sum(i.busy_s for i in self.instances) / span_s / len(self.instances),
            retracted=sum(i.decoding.retractions for i in self.instances),
            events=self.event_count,
            seconds=seconds,
            ttft_s=ttft,
            e2e_s=e2e,
            cached_tokens=np.frombuffer(self.cached_tokens, dtype=np.int64),
            due_s=np.frombuffer(self.due_s),
            prompt_tokens=np.frombuffer(self.prompt_lengths, dtype=np.int64),
        )


def _make_policies(config: SystemConfig) -> tuple[Policy, Policy | None]:
    host = config.host
    device = make_policy(config.device_policy, config.device_policy_config)
    if host is None:
        return device, None
    if (host.policy, dict(host.policy_config)) == (
        config.device_policy,
        dict(config.device_policy_config),
    ):
        return device, device.twin()
    return device, make_policy(host.policy, host.policy_config)


def _make_disks(config: SystemConfig, profile: EngineProfile, block_tokens: int) -> list[Disk]:
    spec = config.disk
    if spec is None:
        return []
    count = config.instances if config.disk_per_instance else 1
    policy_config: Mapping[str, Any] = spec.policy_config
    return [
        Disk(
            spec,
            make_policy(spec.policy, policy_config),
            block_tokens,
            block_tokens * profile.kv_bytes_per_token,
            whole_nodes=config.whole_nodes,
        )
        for _ in range(count)
    ]
