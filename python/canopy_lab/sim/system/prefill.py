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
        self.is_full = False
        """True after a step without room for another request, until a request finishes."""

    def plan(self, now: float) -> PrefillStep | None:
        """Plan the next step and allocate its memory; ``None`` if there is nothing to prefill."""
        running_count = len(self._running)
        if not running_count:
            self.is_full = False
        if (self.is_full or not self._queue.jobs) and self._chunked is None:
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
            new_tokens = min(remaining, chunk_left if limit is None else limit)
            self._claim(job, new_tokens)
            batch.append((job, new_tokens))
            chunk_left -= new_tokens
            input_left -= new_tokens
            # The batch's tokens are allocated; its output and one page are reserved.
            padding += -new_tokens % page + page
            if new_tokens == remaining:
                self._chunked = None
            # the chunked prefill's end may free room
            reserved += remaining - new_tokens + min(job.max_new, CLIP_OUTPUT_TOKENS)
        for job in self._queue.jobs:
            if input_left <= 0 or chunk_left <= 0:
                break
            if running_count + len(batch) >= config.max_running:
                self.is_full = True
                break
            if job in self._queue.deferred:
                continue
            if job.fetch is not None and not self._prefetcher.settle(job, now):  # type: ignore[union-attr]
                continue
            if self._chunked is not None and self._uncached_tokens(job) > chunk_left:
                break
            admission = self._admit(job, reserved + padding, chunk_left)
            if admission is None:
                if self._chunked is not None:
                    break  # there may be room once the chunked prefill is done
                self.is_full = bool(batch) or running_count > 0
                if not self.is_full:
                    self._check_fits(job)
                break
            new_tokens, loaded_tokens = admission
            load_tokens += loaded_tokens
            if math.isnan(job.start_s):
                job.start_s = now
            batch.append((job, new_tokens))
            admitted.append(job)
            chunk_left -= new_tokens
            input_left -= new_tokens
            padding += -new_tokens % page + page
            if job.kv_tokens + new_tokens < job.target:
                self._chunked = job
                break
            reserved += min(job.max_new, CLIP_OUTPUT_TOKENS)
            if self._tree.free + self._tree.evictable <= reserved + padding:
                self.is_full = self._chunked is None
                break
        if not batch:
            return None
        if admitted:
            self._queue.admit(admitted)
        self.batch = batch
        tokens = sum([new_tokens for _, new_tokens in batch])
        self._queue.processed_tokens += tokens
        compute_s = self.costs.prefill([(new_tokens, job.kv_tokens) for job, new_tokens in batch])
        return PrefillStep(compute_s, tokens, load_tokens)

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
        load_tokens = match.tokens - match.device_tokens if hit > device else 0
        if load_tokens < max(1, self._config.load_back_threshold_tokens):
            hit, load_tokens = device, 0
        needed_tokens = load_tokens + job.target - hit
        if needed_tokens + reserved_output(job) + page >= tree.free + tree.evictable - reserved:
            tree.unlock(match.node)
            self._prefixes.record_match(job, match.node)
            return None
        if load_tokens:
            missing_tokens = load_tokens - tree.free
            if missing_tokens > 0:
                tree.evict_device(missing_tokens)
            tree.load(match.node)
            anchor = match.node
        else:
            anchor = match.device
            if anchor is not match.node:
                tree.lock(anchor)
                tree.unlock(match.node)
        job.leaf = anchor
        new_tokens = min(job.target - hit, chunk_left)
        if hit + new_tokens < job.target:
            new_tokens = max((hit + new_tokens) // page * page - hit, min(page, new_tokens))
        if job.target == job.prompt:
            job.device_hit, job.host_hit = device, hit - device
            if job.disk_hit:
                # The part of the host hit that was prefetched from the disk.
                job.disk_hit = max(
                    0, min(job.disk_start + job.disk_hit, hit) - max(job.disk_start, device)
                )
        job.kv_tokens = hit
        self._claim(job, new_tokens)
        return new_tokens, load_tokens

    def _uncached_tokens(self, job: SimulatedRequest) -> int:
        cached = self._queue.match_cached(job)
        return job.target - cached.device - cached.host

    def _claim(self, job: SimulatedRequest, tokens: int) -> None:
        self._tree.claim(tokens)
        job.private += tokens

    def _check_fits(self, job: SimulatedRequest) -> None:
        """Raise ``CanopyError`` if ``job`` exceeds an empty instance."""
        needed_tokens = job.target + reserved_output(job) + self._config.page_tokens
        if needed_tokens < self._config.device_tokens:
            return
        raise CanopyError(
            f"request {job.index + 1} needs {needed_tokens} tokens of device memory (prompt and output), "
            f"device_tokens is {self._config.device_tokens}; give more, or leave the request out"
        )
