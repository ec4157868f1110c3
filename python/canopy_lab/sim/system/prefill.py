"""Plan an instance's prefill steps: admitted requests and their tokens."""

from __future__ import annotations

import math
from typing import NamedTuple

from canopy_lab.sim.system.config import SystemConfig
from canopy_lab.sim.system.decode import RunningBatch
from canopy_lab.sim.system.job import SimulatedRequest
from canopy_lab.sim.system.prefetch import Prefetcher
from canopy_lab.sim.system.queue import Queue
from canopy_lab.sim.system.reservation import CLIP_OUTPUT_TOKENS, reserved_output
from canopy_lab.sim.system.step_costs import Costs
from canopy_lab.sim.system.tree import TieredTree
from canopy_lab.sim.system.waiting import WaitingPrefixes
from sglang_canopy.errors import CanopyError


class PrefillStep(NamedTuple):
    compute_s: float
    tokens: int
    load_tokens: int


class PrefillBatch:
    """The current prefill step and the chunked prefill."""

    def __init__(
        self,
        config: SystemConfig,
        costs: Costs,
        tree: TieredTree,
        queue: Queue,
        running: RunningBatch,
        prefetcher: Prefetcher | None,
        prefixes: WaitingPrefixes,
    ) -> None:
        self.costs = costs
        self._config = config
        self._tree = tree
        self._queue = queue
        self._running = running
        self._prefetcher = prefetcher
        self._prefixes = prefixes
        self.batch: list[tuple[SimulatedRequest, int]] = []
        """Jobs of the current step, with their new tokens."""
        self._chunked: SimulatedRequest | None = None
        self.full = False
        """True after a step without room for another request, until a request finishes."""

    def plan(self, now: float) -> PrefillStep | None:
        """Plan the next step and allocate its memory; ``None`` if there is nothing to prefill."""
        running_count = len(self._running)
        if not running_count:
            self.full = False
        if (self.full or not self._queue.jobs) and self._chunked is None:
            return None
        config = self._config
        self._queue.sort(now, () if self._chunked is None else (self._chunked,))
        input_left, chunk_left = config.max_prefill_tokens, config.chunked_prefill_tokens
        page, padding = config.page_tokens, 0
        reserved = self._running.reserved_tokens()
        batch: list[tuple[SimulatedRequest, int]] = []
        load_tokens = 0
        admitted: list[SimulatedRequest] = []
        if self._chunked is not None:
            job = self._chunked
            remaining = job.target - job.kv_tokens
            limit = self._queue.share(remaining, page, chunk_left)
            new = min(remaining, chunk_left if limit is None else limit)
            self._claim(job, new)
            batch.append((job, new))
            chunk_left -= new
            input_left -= new
            # The batch's tokens are allocated; its output and one page are reserved.
            padding += -new % page + page
            if new == remaining:
                self._chunked = None
            # the chunked prefill's end may free room
            reserved += remaining - new + min(job.max_new, CLIP_OUTPUT_TOKENS)
        for job in self._queue.jobs:
            if input_left <= 0 or chunk_left <= 0:
                break
            if running_count + len(batch) >= config.max_running:
                self.full = True
                break
            if job in self._queue.deferred:
                continue
            if job.fetch is not None and not self._prefetcher.settle(job, now):  # type: ignore[union-attr]
                continue
            if self._chunked is not None and self._to_compute(job) > chunk_left:
                break
            admission = self._admit(job, reserved + padding, chunk_left)
            if admission is None:
                if self._chunked is not None:
                    break  # there may be room once the chunked prefill is done
                self.full = bool(batch) or running_count > 0
                if not self.full:
                    self._refuse(job)
                break
            new, loaded = admission
            load_tokens += loaded
            if math.isnan(job.start):
                job.start = now
            batch.append((job, new))
            admitted.append(job)
            chunk_left -= new
            input_left -= new
            padding += -new % page + page
            if job.kv_tokens + new < job.target:
                self._chunked = job
                break
            reserved += min(job.max_new, CLIP_OUTPUT_TOKENS)
            if self._tree.free + self._tree.evictable <= reserved + padding:
                self.full = self._chunked is None
                break
        if not batch:
            return None
        if admitted:
            self._queue.admit(admitted)
        self.batch = batch
        tokens = sum([new for _, new in batch])
        self._queue.processed_tokens += tokens
        compute = self.costs.prefill([(new, job.kv_tokens) for job, new in batch])
        return PrefillStep(compute, tokens, load_tokens)

    def _admit(
        self, job: SimulatedRequest, reserved: float, chunk_left: int
    ) -> tuple[int, int] | None:
        """Admit ``job``; return (new tokens, tokens loaded from the host), or ``None`` if full."""
        tree, page = self._tree, self._config.page_tokens
        match = tree.match(job.path, None, job.blocks_of(job.target, tree.block_tokens))
        # The last token is always computed, and only whole pages match.
        limit = (job.target - 1) // page * page
        tree.lock(match.node)
        device = min(match.device_tokens // page * page, limit)
        hit = min(match.tokens // page * page, limit)
        load = match.tokens - match.device_tokens if hit > device else 0
        if load < max(1, self._config.load_back_threshold_tokens):
            hit, load = device, 0
        need = load + job.target - hit
        if need + reserved_output(job) + page >= tree.free + tree.evictable - reserved:
            tree.unlock(match.node)
            self._prefixes.looked_up(job, match.node)
            return None
        if load:
            short = load - tree.free
            if short > 0:
                tree.evict_device(short)
            tree.load(match.node)
            anchor = match.node
        else:
            anchor = match.device
            if anchor is not match.node:
                tree.lock(anchor)
                tree.unlock(match.node)
        job.leaf = anchor
        new = min(job.target - hit, chunk_left)
        if hit + new < job.target:
            new = max((hit + new) // page * page - hit, min(page, new))
        if job.target == job.prompt:
            job.device_hit, job.host_hit = device, hit - device
            if job.disk_hit:
                # The part of the host hit that was prefetched from the disk.
                job.disk_hit = max(
                    0, min(job.disk_start + job.disk_hit, hit) - max(job.disk_start, device)
                )
        job.kv_tokens = hit
        self._claim(job, new)
        return new, load

    def _to_compute(self, job: SimulatedRequest) -> int:
        cached = self._queue.match_cached(job)
        return job.target - cached.device - cached.host

    def _claim(self, job: SimulatedRequest, tokens: int) -> None:
        self._tree.claim(tokens)
        job.private += tokens

    def _refuse(self, job: SimulatedRequest) -> None:
        """Raise ``CanopyError`` if ``job`` exceeds an empty instance."""
        need = job.target + reserved_output(job) + self._config.page_tokens
        if need < self._config.device_tokens:
            return
        raise CanopyError(
            f"request {job.index + 1} needs {need} tokens of device memory (prompt and output), "
            f"device_tokens is {self._config.device_tokens}; give more, or leave the request out"
        )
