"""One SGLang instance: its queue, its prefill and decode steps, its device and host memory.

The scheduler is SGLang's (``managers/scheduler.py``, ``schedule_policy.py``) in its default mode:
first come, first served; prefill first; chunked prefill; a request is let in when its prompt and
all it may generate fit into what is free or evictable. Decode steps are not simulated one by one:
a batch decodes in one *segment* up to the next moment at which anything changes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import Policy
from sglang_canopy.sim.system.channel import Link
from sglang_canopy.sim.system.config import SystemConfig
from sglang_canopy.sim.system.costs import Costs
from sglang_canopy.sim.system.disk import Disk
from sglang_canopy.sim.system.events import EventLog
from sglang_canopy.sim.system.expiry import Expiry
from sglang_canopy.sim.system.job import SimulatedRequest
from sglang_canopy.sim.system.placement import Placement
from sglang_canopy.sim.system.prefetch import Prefetcher
from sglang_canopy.sim.system.request_log import RequestLog
from sglang_canopy.sim.system.tree import TieredTree

CLIP_OUTPUT_TOKENS = 4096
"""SGLang reserves room for no more output than this (``CLIP_MAX_NEW_TOKENS``)."""


class Instance:
    """One instance. Its methods take ``now`` and return when to call next (see ``run.py``)."""

    def __init__(
        self,
        number: int,
        config: SystemConfig,
        costs: Costs,
        block_tokens: int,
        device_policy: Policy,
        host_policy: Policy | None,
        disk: Disk | None,
        events: EventLog | None,
    ) -> None:
        self.name = f"instance {number}"
        self.config = config
        self.costs = costs
        self.disk = disk
        self.events = events
        self.request_log = RequestLog(events, self.name) if events is not None else None
        self.kv_bytes = costs.kv_bytes
        host = config.host
        self.host_link = Link(host) if host is not None else None
        self.waits_for_disk = config.prefetch_policy != "best_effort"
        """Whether a request that nothing else holds up waits for its prefetch."""
        self.tree = TieredTree(
            device_policy,
            config.device_tokens,
            block_tokens,
            host_policy=host_policy,
            host_tokens=int(host.capacity_bytes // self.kv_bytes) if host is not None else 0,
            host_expiry=Expiry.of(host.ttl) if host is not None else None,
            write_back=config.write_policy == "write_back",
            whole_nodes=config.whole_nodes,
            quantum_tokens=config.quantum_tokens,
        )
        self.prefetcher = (
            Prefetcher(disk, self.tree, config, self.kv_bytes) if disk is not None else None
        )
        self.placement = Placement(
            self.tree, self.host_link, disk, self.kv_bytes, config.page_tokens, self._span
        )
        self.policies = [device_policy] + ([host_policy] if host_policy is not None else [])
        self.waiting: deque[SimulatedRequest] = deque()
        self.running: list[tuple[int, int, SimulatedRequest]] = []
        """Heap of (step at which the job is done, sequence, job)."""
        self.steps = 0
        """Decode steps so far."""
        self.finish_sum = 0
        """Sum of the running jobs' last steps: what they still generate, plus steps each."""
        self.context = 0
        """Tokens of all running jobs."""
        self.chunked: SimulatedRequest | None = None
        self.full = False
        """No request was let in for lack of room, and none has left since."""
        self.batch: list[tuple[SimulatedRequest, int]] = []
        """The prefill step under way: jobs and their new tokens."""
        self.segment: tuple[float, int, float] | None = None
        """The decode segment under way: begin, steps, end."""
        self.version = 0
        """Counts plans, so that an end that was brought forward is ignored."""
        self.end = math.inf
        self.outstanding = 0
        """Prompt and output tokens of requests routed here that are not done."""
        self.busy_s = 0.0
        self.retracted = 0
        self.finished: list[tuple[SimulatedRequest, float]] = []
        self._numbers = itertools.count()

    # ---- called by the loop ----

    def arrive(self, job: SimulatedRequest, now: float) -> None:
        """A request comes in. Brings the end of a decode segment forward to the next step."""
        self.tree.now = max(self.tree.now, now)
        request = job.request
        request.label = self.policies[0].arrive(request)
        for policy in self.policies[1:]:
            policy.arrive(request)
        if self.disk is not None:
            self.disk.policy.arrive(request)
            self.prefetcher.asking.append(job)  # type: ignore[union-attr]  # both or none
        self.outstanding += job.prompt + job.output
        self.waiting.append(job)
        if self.segment is not None and not self.full:
            self.interrupt(now)

    def interrupt(self, now: float) -> None:
        """End the decode segment with the step under way ``now``."""
        if self.segment is None:
            return
        begin, steps, end = self.segment
        if now >= end:
            return
        batch = len(self.running)
        mean = self.context / batch
        # A step costs about as much as the next: the share of the time is that of the steps.
        part = max(1, math.ceil((now - begin) / (end - begin) * steps))
        while part < steps and self.costs.decode(batch, mean, part) < now - begin:
            part += 1
        if part < steps:
            self._plan_segment(begin, part)

    def idle(self) -> bool:
        return self.segment is None and not self.batch

    def advance(self, now: float) -> None:
        """The step under way ends ``now``, or the instance is idle: settle it and plan the next."""
        self.tree.now = max(self.tree.now, now)
        if self.batch:
            self._end_prefill(now)
        elif self.segment is not None:
            self._end_segment(now)
        self.version += 1
        self.end = math.inf
        prefetcher = self.prefetcher
        if prefetcher is not None and prefetcher.asking and self.waits_for_disk:
            prefetcher.ask(now)
        planned = self._plan_prefill(now)
        if prefetcher is not None and prefetcher.asking:
            # Whoever was let in at once has no time to wait for the disk.
            prefetcher.ask(now)
        if not planned and self.running:
            self._plan_decode(now)
        if self.tree.demoted:
            self.placement.write_demoted(now)

    # ---- prefill ----

    def _plan_prefill(self, now: float) -> bool:
        if not self.running:
            self.full = False
        if (self.full or not self.waiting) and self.chunked is None:
            return False
        config = self.config
        input_left, chunk_left = config.max_prefill_tokens, config.chunked_prefill_tokens
        running = len(self.running)
        reserved = self.finish_sum - running * self.steps
        batch: list[tuple[SimulatedRequest, int]] = []
        load_tokens = 0
        let_in: set[SimulatedRequest] = set()
        if self.chunked is not None:
            job = self.chunked
            new = min(job.target - job.done, chunk_left)
            self._claim(job, new)
            batch.append((job, new))
            chunk_left -= new
            input_left -= new
            # What the batch takes is private already; what it will generate is reserved.
            if job.done + new >= job.target:
                self.chunked = None
                reserved += min(job.output, CLIP_OUTPUT_TOKENS)
        for job in self.waiting:
            if input_left <= 0 or chunk_left <= 0:
                break
            if running + len(batch) >= config.max_running:
                self.full = True
                break
            if job.fetch is not None and not self.prefetcher.settle(job, now):  # type: ignore[union-attr]
                continue
            taken = self._admit(job, reserved, chunk_left)
            if taken is None:
                self.full = bool(batch) or running > 0
                if not self.full:
                    self._refuse(job)
                break
            new, loaded = taken
            load_tokens += loaded
            if math.isnan(job.start):
                job.start = now
            batch.append((job, new))
            let_in.add(job)
            chunk_left -= new
            input_left -= new
            if job.done + new < job.target:
                self.chunked = job
                break
            reserved += min(job.output - (job.target - job.prompt), CLIP_OUTPUT_TOKENS)
        if not batch:
            return False
        while self.waiting and self.waiting[0] in let_in:
            let_in.remove(self.waiting.popleft())
        if let_in:
            self.waiting = deque(job for job in self.waiting if job not in let_in)
        self.batch = batch
        compute = self.costs.prefill([(new, job.done) for job, new in batch])
        duration = compute
        if load_tokens and self.host_link is not None:
            _, loaded_at = self.host_link.read(now, load_tokens * self.kv_bytes)
            duration = self.costs.overlapped(compute, loaded_at - now)
            if self.events is not None:
                self._span("host reads", "load", now, loaded_at, tokens=load_tokens)
        self.end = now + duration
        self.busy_s += duration
        if self.events is not None:
            tokens = sum(new for _, new in batch)
            self._span("engine", "prefill", now, self.end, requests=len(batch), tokens=tokens)
        return True

    def _admit(
        self, job: SimulatedRequest, reserved: int, chunk_left: int
    ) -> tuple[int, int] | None:
        """Let ``job`` in: its new tokens and those loaded from the host; ``None`` if no room."""
        tree, page = self.tree, self.config.page_tokens
        found = tree.match(job.path[: job.blocks_of(job.target, tree.block_tokens)])
        # The last token is always computed, and only whole pages are found.
        limit = (job.target - 1) // page * page
        tree.lock(found.node)
        device = min(found.device_tokens // page * page, limit)
        hit = min(found.tokens // page * page, limit)
        load = found.tokens - found.device_tokens if hit > device else 0
        if load < max(1, self.config.load_back_threshold_tokens):
            hit, load = device, 0
        need = load + job.target - hit
        out = min(job.output - (job.target - job.prompt), CLIP_OUTPUT_TOKENS)
        if need + out + page >= tree.free + tree.evictable - reserved:
            tree.unlock(found.node)
            return None
        if load:
            short = load - tree.free
            if short > 0:
                tree.evict_device(short)
            tree.load(found.node)
            anchor = found.node
        else:
            anchor = found.device
            if anchor is not found.node:
                tree.lock(anchor)
                tree.unlock(found.node)
        job.leaf = anchor
        new = min(job.target - hit, chunk_left)
        if hit + new < job.target:
            new = max((hit + new) // page * page - hit, min(page, new))
        if job.target == job.prompt:
            job.device_hit, job.host_hit = device, hit - device
            if job.disk_hit:
                # Of what came from the host, the part that the disk had given.
                job.disk_hit = max(
                    0, min(job.disk_start + job.disk_hit, hit) - max(job.disk_start, device)
                )
        job.done = hit
        self._claim(job, new)
        return new, load

    def _claim(self, job: SimulatedRequest, tokens: int) -> None:
        self.tree.claim(tokens)
        job.private += tokens

    def _refuse(self, job: SimulatedRequest) -> None:
        """Nothing runs and the first request still does not fit: it never will."""
        need = job.target + min(job.output, CLIP_OUTPUT_TOKENS) + self.config.page_tokens
        if need < self.config.device_tokens:
            return
        raise CanopyError(
            f"request {job.index + 1} needs {need} tokens of device memory (prompt and output), "
            f"device_tokens is {self.config.device_tokens}; give more, or leave the request out"
        )

    def _end_prefill(self, now: float) -> None:
        for job, new in self.batch:
            job.done += new
            self.placement.insert(job, job.done, now)
            if job.done < job.target:
                continue
            if math.isnan(job.first_token):
                job.first_token = now
            left = job.output - (job.target - job.prompt) - 1
            if left <= 0:
                self._finish(job, now)
                continue
            heapq.heappush(self.running, (self.steps + left, next(self._numbers), job))
            self.finish_sum += self.steps + left
            self.context += job.target + 1
        self.batch = []

    # ---- decode ----

    def _plan_decode(self, now: float) -> None:
        batch = len(self.running)
        steps = self.running[0][0] - self.steps
        tree = self.tree
        room = (tree.free + tree.evictable) // batch
        while room < 1 and len(self.running) > 1:
            self._retract()
            batch = len(self.running)
            steps = self.running[0][0] - self.steps
            room = (tree.free + tree.evictable) // batch
        self._plan_segment(now, max(1, min(steps, room)))

    def _plan_segment(self, begin: float, steps: int) -> None:
        batch = len(self.running)
        duration = self.costs.decode(batch, self.context / batch, steps)
        self.segment = begin, steps, begin + duration
        self.end = begin + duration
        self.version += 1

    def _end_segment(self, now: float) -> None:
        assert self.segment is not None
        begin, steps, _ = self.segment
        self.segment = None
        batch = len(self.running)
        self.busy_s += now - begin
        if self.events is not None:
            self._span("engine", "decode", begin, now, requests=batch, steps=steps)
        self.tree.claim(batch * steps)
        self.steps += steps
        self.context += batch * steps
        while self.running and self.running[0][0] <= self.steps:
            finish, _, job = heapq.heappop(self.running)
            self.finish_sum -= finish
            self.context -= job.prompt + job.output
            # Its share of what the batch has claimed; the last token has no KV.
            job.private += job.output - 1 - (job.target - job.prompt)
            self._finish(job, now)
            self.full = False

    def _retract(self) -> None:
        """Take the running request with the least output back to the queue."""
        job = min(self.running, key=lambda entry: (self._made(entry), -entry[2].prompt))[2]
        entry = next(e for e in self.running if e[2] is job)
        made = self._made(entry)
        self.running.remove(entry)
        heapq.heapify(self.running)
        self.finish_sum -= entry[0]
        self.context -= job.prompt + made
        self.retracted += 1
        job.private += made - 1 - (job.target - job.prompt)
        self.tree.private -= job.private
        job.private = 0
        if job.leaf is not None:
            self.tree.unlock(job.leaf)
            job.leaf = None
        job.target = job.prompt + made
        job.done = 0
        self.waiting.append(job)

    def _made(self, entry: tuple[int, int, SimulatedRequest]) -> int:
        """Tokens that a running job has generated."""
        finish, _, job = entry
        return job.output - (finish - self.steps)

    def _finish(self, job: SimulatedRequest, now: float) -> None:
        request = job.request
        request.cached_tokens = job.device_hit + job.host_hit
        request.label = self.policies[0].finish(request)
        for policy in self.policies[1:]:
            policy.finish(request)
        if self.disk is not None:
            self.disk.policy.finish(request)
        self.placement.insert(job, job.end_tokens, now)
        # Duplicates of what others had put there, and what is not a whole page, are free.
        self.tree.private -= job.private
        job.private = 0
        if job.leaf is not None:
            self.tree.unlock(job.leaf)
        self.outstanding -= job.prompt + job.output
        self.finished.append((job, now))
        if self.request_log is not None:
            self.request_log.add(job, now)

    # ---- the log ----

    def _span(self, track: str, name: str, begin: float, end: float, **args: Any) -> None:
        if self.events is not None:
            self.events.span(self.name, track, name, begin, end, **args)
