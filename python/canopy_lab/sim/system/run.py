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
from canopy_lab.sim.system.step_costs import Costs
from canopy_lab.sim.system.tier_usage import TierUsage
from canopy_lab.sim.system.workload import Workload
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.registry import make_policy

_ARRIVAL, _STEP = 0, 1
"""Event kinds. An arrival precedes the end of a step at the same time."""
_SWEEPS = 256
"""Sweeps for expired pages per run."""
_COLLECT_EVERY = 100_000
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
    with _rare_collections():
        run.serve()
    return run.result(time.perf_counter() - start_s)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Run the garbage collector rarely: without cycles, it only costs a tenth of the time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(max(thresholds[0], _COLLECT_EVERY), *thresholds[1:])
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
        self.disks = _disks(config, profile, workload.block_tokens)
        costs = Costs(profile)
        self.instances = [
            Instance(
                config,
                costs,
                workload.block_tokens,
                *_policies(config),
                self.disks[number % len(self.disks)] if self.disks else None,
            )
            for number in range(config.instances)
        ]
        self.router = Router(config.routing, self.instances)
        self.heap: list[tuple[float, int, int, Any]] = []
        self.sequence = 0
        self.events = 0
        count = len(workload)
        self.ttft_s = array("d", [0.0]) * count
        self.e2e_s = array("d", [0.0]) * count
        self.tpot_sum, self.tpot_count = 0.0, 0
        self.queue_s = 0.0
        self.cached = array("q", [0]) * count
        self.due_s = array("d", [0.0]) * count
        self.prompts = array("q", [0]) * count
        self.hits = {"device": 0, "host": 0, "disk": 0}
        self.saved = dict.fromkeys(self.hits, 0.0)
        self.costs = costs
        self.prompt_tokens = self.output_tokens = 0
        self.first_arrivals = arrivals.first_requests()
        self.start_s = self.end_s = self.first_arrivals[0][0]
        self.clock = -math.inf
        self.tier_usage = TierUsage(
            self.instances, self.disks, profile.kv_bytes_per_token, self.end_s
        )

    def serve(self) -> None:
        """Run from the first arrival to the last token."""
        heap, first_arrivals = self.heap, self.first_arrivals
        count, index = len(first_arrivals), 0
        span_s = max(self.workload.times[-1] - self.workload.times[0], 1.0)
        sweep_every = span_s / _SWEEPS if self._expires() else math.inf
        next_sweep = self.start_s + sweep_every
        while index < count or heap:
            if index < count and (not heap or (first_arrivals[index][0], _ARRIVAL) <= heap[0][:2]):
                now, number = first_arrivals[index]
                index += 1
                self.events += 1
                self._arrive(number, now)
                continue
            now, kind, _, payload = heapq.heappop(heap)
            if kind == _ARRIVAL:
                self.events += 1
                self._arrive(payload, now)
                continue
            instance, version = payload
            if version != instance.version:
                continue
            self.events += 1
            if now >= next_sweep:
                next_sweep = now + sweep_every
                self._sweep(now)
            self._step(instance, now)
        for instance in self.instances:
            instance.check_empty()

    def _arrive(self, number: int, now: float) -> None:
        request, path, prompt, output, end_tokens = self.workload.request(number)
        # Policies receive a request's arrival time in the simulation; no two are equal.
        self.clock = now if now > self.clock else math.nextafter(self.clock, math.inf)
        request.time = self.clock
        job = SimulatedRequest(number, now, request, path, prompt, output, end_tokens)
        instance = self.instances[self.router.choose(job.request.path)]
        version = instance.version
        instance.arrive(job, now)
        if instance.is_idle():
            self._step(instance, now)
        elif instance.version != version:
            self._push(instance.end_s, _STEP, (instance, instance.version))

    def _step(self, instance: Instance, now: float) -> None:
        instance.advance(now)
        if instance.finished:
            for job, end in instance.finished:
                self._account(job, end)
                for due, following in self.arrivals.following_requests(job.index, end):
                    self._push(due, _ARRIVAL, following)
            instance.finished.clear()
        self.tier_usage.sample(now, instance)
        if instance.end_s < math.inf:
            self._push(instance.end_s, _STEP, (instance, instance.version))
        elif instance.waiting_count:
            wake = instance.wake_at(now)
            if wake < math.inf:
                self._push(wake, _STEP, (instance, instance.version))

    def _push(self, time_s: float, kind: int, payload: Any) -> None:
        self.sequence += 1
        heapq.heappush(self.heap, (time_s, kind, self.sequence, payload))

    def _expires(self) -> bool:
        tiers = (self.config.host, self.config.disk)
        return any(tier is not None and tier.ttl is not None for tier in tiers)

    def _sweep(self, now: float) -> None:
        for instance in self.instances:
            instance.tree.expire()
        for disk in self.disks:
            disk.sweep(now)

    def _account(self, job: SimulatedRequest, end: float) -> None:
        index, client_s = job.index, self.profile.arrival_s
        self.ttft_s[index] = job.first_token_s - job.arrival_s + client_s
        self.e2e_s[index] = end - job.arrival_s + client_s
        if job.output > 1:
            self.tpot_sum += (end - job.first_token_s) / (job.output - 1)
            self.tpot_count += 1
        self.queue_s += job.start_s - job.arrival_s
        disk = job.disk_hit
        self.cached[index] = job.device_hit + job.host_hit
        self.hits["device"] += job.device_hit
        self.hits["host"] += job.host_hit - disk
        self.hits["disk"] += disk
        self.due_s[index], self.prompts[index] = job.arrival_s, job.prompt
        context, cost = 0, self.costs.prefill([(job.prompt, 0)])
        for tier, hit in zip(self.hits, (job.device_hit, job.host_hit - disk, disk), strict=True):
            if hit:
                context += hit
                rest_cost = self.costs.prefill([(job.prompt - context, context)])
                self.saved[tier] += cost - rest_cost
                cost = rest_cost
        self.prompt_tokens += job.prompt
        self.output_tokens += job.output
        self.end_s = max(self.end_s, end)

    def result(self, seconds: float) -> SystemResult:
        """Return the totals as a ``SystemResult``."""
        start_s, kv_bytes = self.start_s, self.profile.kv_bytes_per_token
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
            mean_tpot_s=self.tpot_sum / self.tpot_count if self.tpot_count else 0.0,
            mean_e2e_s=float(e2e.mean()),
            throughput_tokens_per_s=(self.prompt_tokens + self.output_tokens) / span_s,
            output_tokens_per_s=self.output_tokens / span_s,
            makespan_s=span_s,
            token_hit_ratio=sum(self.hits.values()) / self.prompt_tokens,
            token_hit_ratio_by_tier={t: n / self.prompt_tokens for t, n in self.hits.items()},
            mean_bytes_by_tier=self.tier_usage.means(span_s),
            peak_bytes_by_tier=self.tier_usage.peaks(),
            host_written_bytes=sum(i.tree.host_written for i in self.instances) * float(kv_bytes),
            disk_read_bytes=sum(disk.channel.read_bytes for disk in self.disks),
            disk_written_bytes=sum(disk.channel.written_bytes for disk in self.disks),
            prefill_s_saved_by_tier=self.saved,
            mean_queue_s=self.queue_s / len(ttft),
            peak_queue_length=self.tier_usage.peak_queue,
            busy_share=sum(i.busy_s for i in self.instances) / span_s / len(self.instances),
            retracted=sum(i.decoding.retractions for i in self.instances),
            events=self.events,
            seconds=seconds,
            ttft_s=ttft,
            e2e_s=e2e,
            cached_tokens=np.frombuffer(self.cached, dtype=np.int64),
            due_s=np.frombuffer(self.due_s),
            prompt_tokens=np.frombuffer(self.prompts, dtype=np.int64),
        )


def _policies(config: SystemConfig) -> tuple[Policy, Policy | None]:
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


def _disks(config: SystemConfig, profile: EngineProfile, block_tokens: int) -> list[Disk]:
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
