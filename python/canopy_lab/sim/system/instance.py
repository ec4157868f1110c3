"""One SGLang instance: queue, prefill and decode steps, device and host memory.

Follows SGLang's scheduler (``managers/scheduler.py``, ``schedule_policy.py``) in its default mode:
prefill first, with chunks. A request is admitted if its prompt and maximum output fit into free or
evictable memory, in addition to the reservations of running requests (``reservation.py``).
"""

from __future__ import annotations

import math

from canopy_lab.sim.system.channel import Link
from canopy_lab.sim.system.config import USES_BEFORE_COPY, SystemConfig
from canopy_lab.sim.system.decode import RunningBatch
from canopy_lab.sim.system.disk import Disk
from canopy_lab.sim.system.gate import make_session_gate
from canopy_lab.sim.system.job import SimulatedRequest
from canopy_lab.sim.system.placement import Placement
from canopy_lab.sim.system.prefetch import Prefetcher
from canopy_lab.sim.system.prefill import PrefillBatch
from canopy_lab.sim.system.queue import Queue
from canopy_lab.sim.system.queue_order import make_queue_order
from canopy_lab.sim.system.reservation import NewTokenRatio
from canopy_lab.sim.system.step_costs import StepCosts
from canopy_lab.sim.system.tier_spec import Expiry
from canopy_lab.sim.system.tree import TieredTree
from canopy_lab.sim.system.waiting import ProtectedPrefixes, TouchedPrefixes, WaitingPrefixes
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import Policy


class Instance:
    """One instance. Its methods take ``now`` in seconds; ``run.py`` calls them."""

    def __init__(
        self,
        config: SystemConfig,
        costs: StepCosts,
        block_tokens: int,
        device_policy: Policy,
        host_policy: Policy | None,
        disk: Disk | None,
    ) -> None:
        self.config = config
        self.disk = disk
        kv_bytes, host = costs.kv_bytes, config.host
        self.host_link = Link(host) if host is not None else None
        self.waits_for_disk = config.prefetch_policy != "best_effort"
        """True if an otherwise admissible request waits for its prefetch."""
        host_tokens = int(host.capacity_bytes // kv_bytes) if host is not None else 0
        min_uses = USES_BEFORE_COPY[config.write_policy]
        self.tree = TieredTree(
            device_policy,
            config.device_tokens,
            block_tokens,
            host_policy=host_policy,
            host_tokens=host_tokens,
            host_expiry=Expiry.from_ttl(host.ttl) if host is not None else None,
            write_back=not min_uses,
            whole_nodes=config.whole_nodes,
            quantum_tokens=config.quantum_tokens,
        )
        prefixes_class = TouchedPrefixes if config.touches_waiting else ProtectedPrefixes
        prefixes: WaitingPrefixes = prefixes_class(self.tree)
        self.queue = Queue(
            self.tree,
            costs,
            self.host_link,
            config.page_tokens,
            make_queue_order(config.schedule_policy, config.schedule_policy_config),
            make_session_gate(
                config.session_gate, config.device_tokens, host_tokens, config.session_gate_config
            ),
            prefixes,
            min(config.chunked_prefill_tokens, config.max_prefill_tokens),
        )
        self.prefetcher = (
            Prefetcher(disk, self.tree, config, kv_bytes, prefixes) if disk is not None else None
        )
        self.placement = Placement(
            self.tree, self.host_link, disk, kv_bytes, config.page_tokens, min_uses, prefixes
        )
        self.decoding = RunningBatch(
            self.tree, costs, NewTokenRatio(config.schedule_conservativeness), config.fixed_outputs
        )
        self.prefilling = PrefillBatch(
            config, costs, self.tree, self.queue, self.decoding, self.prefetcher, prefixes
        )
        self.policies = [device_policy] + ([host_policy] if host_policy is not None else [])
        self.plan_version = 0
        """Number of plans, to ignore events of replaced plans."""
        self.end_s = math.inf
        """End of the current step; infinity while idle."""
        self.busy_s = 0.0
        self.finished: list[tuple[SimulatedRequest, float]] = []

    @property
    def waiting_count(self) -> int:
        return len(self.queue.jobs) + len(self.queue.held_jobs)

    @property
    def request_count(self) -> int:
        return self.waiting_count + len(self.decoding.jobs) + len(self.prefilling.batch)

    # ---- called by the event loop ----

    def arrive(self, job: SimulatedRequest, now: float) -> None:
        """Add a request; a running decode segment then ends with its current step."""
        self.tree.now = max(self.tree.now, now)
        if not self.request_count:
            self.decoding.new_token_ratio.reset()
        request = job.request
        request.label = self.policies[0].arrive(request)
        for policy in self.policies[1:]:
            policy.arrive(request)
        if self.disk is not None:
            self.disk.policy.arrive(request)
        if self.queue.arrive(job, now):
            self._start_waiting(job, now)

    def _start_waiting(self, job: SimulatedRequest, now: float) -> None:
        if self.prefetcher is not None:
            self.prefetcher.to_prefetch.append(job)
        if not self.prefilling.is_full:
            self.interrupt(now)

    def interrupt(self, now: float) -> None:
        """End the decode segment with its current step."""
        if self.decoding.interrupt(now):
            self._plan_segment()

    def is_idle(self) -> bool:
        return self.decoding.segment is None and not self.prefilling.batch

    def wake_at(self, now: float) -> float:
        """Return the time at which an idle instance must check its gate and prefetches."""
        time_s = self.queue.gate_due(now)
        if self.queue.jobs and self.prefetcher is not None:
            time_s = min(time_s, self.prefetcher.wake_at(self.queue.jobs, now))
        return max(time_s, now + 1e-6)

    def advance(self, now: float) -> None:
        """Finish the current step, if any, at ``now``, and plan the next."""
        self.tree.now = max(self.tree.now, now)
        if self.disk is not None and self.disk.channel.is_busy:
            self.disk.channel.advance(now)
        count = len(self.finished)
        if self.prefilling.batch:
            self._end_prefill(now)
        elif self.decoding.segment is not None:
            self.decoding.claim()
            if self._copy_demoted(now):
                self.plan_version += 1
                return
            self._end_segment(now)
        if self.queue.held_jobs and (len(self.finished) > count or self.queue.gate_due(now) <= now):
            for job in self.queue.offer_held(now):
                self._start_waiting(job, now)
        self.plan_version += 1
        self.end_s = math.inf
        prefetcher = self.prefetcher
        if prefetcher is not None and prefetcher.to_prefetch and self.waits_for_disk:
            prefetcher.start_prefetches(now)
        is_planned = self._plan_prefill(now)
        if prefetcher is not None and prefetcher.to_prefetch:
            # Requests admitted at once start without a prefetch.
            prefetcher.start_prefetches(now)
        if not is_planned and self.decoding.jobs:
            for job in self.decoding.plan(now):
                self.queue.readd(job)
                self.prefilling.is_full = False
            self._plan_segment()
        self._copy_demoted(now)

    # ---- steps ----

    def _plan_prefill(self, now: float) -> bool:
        step = self.prefilling.plan(now)
        if step is None:
            return False
        duration_s = compute_s = step.compute_s
        if step.load_tokens and self.host_link is not None:
            _, loaded_s = self.host_link.read(now, step.load_tokens * self.placement.kv_bytes)
            duration_s = self.prefilling.costs.overlapped_s(compute_s, loaded_s - now)
        self.end_s = now + duration_s
        self.busy_s += duration_s
        return True

    def _copy_demoted(self, now: float) -> bool:
        """Copy nodes evicted under ``write_back``; return whether the step must wait for it."""
        if not self.tree.demoted:
            return False
        copied_s = self.placement.write_demoted(now)
        if self.end_s == math.inf or copied_s <= now:
            return False
        # A decode segment allocates its tokens at its end, which moves.
        self.end_s = max(self.end_s, now) + copied_s - now
        return True

    def _plan_segment(self) -> None:
        assert self.decoding.segment is not None
        self.end_s = self.decoding.segment.end_s
        self.plan_version += 1

    def _end_prefill(self, now: float) -> None:
        for job, new_tokens in self.prefilling.batch:
            job.kv_tokens += new_tokens
            self.placement.insert(job, job.kv_tokens, now)
            if job.kv_tokens < job.target_tokens:
                continue
            if math.isnan(job.first_token_s):
                job.first_token_s = now
            remaining = job.output_tokens - (job.target_tokens - job.prompt_tokens) - 1
            if remaining <= 0:
                self._finish(job, now)
            else:
                self.decoding.add(job, remaining)
        self.prefilling.batch = []

    def _end_segment(self, now: float) -> None:
        segment, finished = self.decoding.finish_segment()
        self.busy_s += now - segment.begin_s
        for job in finished:
            self._finish(job, now)
            self.prefilling.is_full = False

    def _finish(self, job: SimulatedRequest, now: float) -> None:
        request = job.request
        request.cached_tokens = job.device_hit_tokens + job.host_hit_tokens
        request.label = self.policies[0].finish(request)
        for policy in self.policies[1:]:
            policy.finish(request)
        if self.disk is not None:
            self.disk.policy.finish(request)
        self.placement.insert(job, job.end_tokens, now)
        # Free tokens that other requests had already inserted, and partial pages.
        self.tree.private_tokens -= job.private_tokens
        job.private_tokens = 0
        if job.leaf is not None:
            self.tree.unlock(job.leaf)
        self.queue.record_end(job, now)
        self.finished.append((job, now))

    # ---- end of the run ----

    def check_empty(self) -> None:
        """Raise ``CanopyError`` if the gate still holds requests."""
        held_count = len(self.queue.held_jobs)
        if held_count:
            raise CanopyError(
                f"the session gate {self.config.session_gate!r} never admitted {held_count} requests; "
                "its wake_at must name a time while it refuses"
            )
