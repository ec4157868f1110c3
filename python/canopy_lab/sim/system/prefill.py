"""Plan an instance's prefill steps: admitted requests and their tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from canopy_lab.sim.system.config import SystemConfig
from canopy_lab.sim.system.decode import RunningBatch
from canopy_lab.sim.system.job import SimulatedRequest
from canopy_lab.sim.system.prefetch import Prefetcher
from canopy_lab.sim.system.queue import Queue
from canopy_lab.sim.system.reservation import CLIP_OUTPUT_TOKENS, reserved_output
from canopy_lab.sim.system.step_costs import StepCosts
from canopy_lab.sim.system.tree import TieredTree
from canopy_lab.sim.system.waiting import WaitingPrefixes
from sglang_canopy.errors import CanopyError


class PrefillStep(NamedTuple):
    compute_s: float
    tokens: int
    load_tokens: int


@dataclass(slots=True)
class _StepRoom:
    """The jobs of a step, with their new tokens, and the tokens left for further jobs."""

    input_tokens_left: int
    chunk_tokens_left: int
    reserved_tokens: float
    """Output that this step's and the running jobs may still allocate."""
    padding_tokens: int = 0
    batch: list[tuple[SimulatedRequest, int]] = field(default_factory=list)

    @property
    def unavailable_tokens(self) -> float:
        return self.reserved_tokens + self.padding_tokens

    def add(self, job: SimulatedRequest, new_tokens: int, page: int) -> None:
        """Add a job. Its new tokens are allocated; the rest of its page and one more are kept free."""
        self.batch.append((job, new_tokens))
        self.chunk_tokens_left -= new_tokens
        self.input_tokens_left -= new_tokens
        self.padding_tokens += -new_tokens % page + page


class PrefillBatch:
    """The current prefill step and the chunked prefill."""

    def __init__(
        self,
        config: SystemConfig,
        costs: StepCosts,
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
        if not len(self._running):
            self.is_full = False
        if (self.is_full or not self._queue.jobs) and self._chunked is None:
            return None
        config = self._config
        self._queue.sort(now, () if self._chunked is None else (self._chunked,))
        reserved_tokens = self._running.reserved_tokens()
        room = _StepRoom(config.max_prefill_tokens, config.chunked_prefill_tokens, reserved_tokens)
        if self._chunked is not None:
            self._add_chunked(self._chunked, room)
        load_tokens = self._add_waiting(room, now)
        if not room.batch:
            return None
        self.batch = room.batch
        tokens = sum([new_tokens for _, new_tokens in self.batch])
        self._queue.processed_tokens += tokens
        compute_s = self.costs.prefill_s([(new, job.kv_tokens) for job, new in self.batch])
        return PrefillStep(compute_s, tokens, load_tokens)

    def _add_chunked(self, job: SimulatedRequest, room: _StepRoom) -> None:
        """Add the next part of the chunked prefill to the step."""
        page = self._config.page_tokens
        remaining = job.target_tokens - job.kv_tokens
        step_tokens = room.chunk_tokens_left
        limit_tokens = self._queue.share_step(remaining, page, step_tokens)
        new_tokens = min(remaining, step_tokens if limit_tokens is None else limit_tokens)
        self._claim(job, new_tokens)
        room.add(job, new_tokens, page)
        if new_tokens == remaining:
            self._chunked = None
        # The rest of the prompt needs memory, too.
        room.reserved_tokens += remaining - new_tokens + min(job.max_new_tokens, CLIP_OUTPUT_TOKENS)

    def _add_waiting(self, room: _StepRoom, now: float) -> int:
        """Admit queued jobs while there is room; return the tokens to load from the host."""
        admitted: list[SimulatedRequest] = []
        load_tokens, running_count = 0, len(self._running)
        for job in self._queue.jobs:
            if room.input_tokens_left <= 0 or room.chunk_tokens_left <= 0:
                break
            if running_count + len(room.batch) >= self._config.max_running:
                self.is_full = True
                break
            if job in self._queue.deferred:
                continue
            if job.fetch is not None and not self._prefetcher.settle(job, now):  # type: ignore[union-attr]
                continue
            if self._chunked is not None and self._uncached_tokens(job) > room.chunk_tokens_left:
                break
            admission = self._admit(job, room.unavailable_tokens, room.chunk_tokens_left)
            if admission is None:
                if self._chunked is not None:
                    break  # there may be room once the chunked prefill is done
                self.is_full = bool(room.batch) or running_count > 0
                if not self.is_full:
                    self._check_fits(job)
                break
            new_tokens, loaded_tokens = admission
            load_tokens += loaded_tokens
            if math.isnan(job.start_s):
                job.start_s = now
            room.add(job, new_tokens, self._config.page_tokens)
            admitted.append(job)
            if job.kv_tokens + new_tokens < job.target_tokens:
                self._chunked = job
                break
            room.reserved_tokens += min(job.max_new_tokens, CLIP_OUTPUT_TOKENS)
            if self._tree.available_tokens <= room.unavailable_tokens:
                self.is_full = self._chunked is None
                break
        if admitted:
            self._queue.admit(admitted)
        return load_tokens

    def _admit(
        self, job: SimulatedRequest, reserved_tokens: float, chunk_tokens_left: int
    ) -> tuple[int, int] | None:
        """Admit ``job``; return (new tokens, tokens loaded from the host), or ``None`` if full."""
        tree, page = self._tree, self._config.page_tokens
        match = tree.match(job.path, None, job.blocks_of(job.target_tokens, tree.block_tokens))
        # The last token is always computed, and only whole pages match.
        max_hit = (job.target_tokens - 1) // page * page
        tree.lock(match.node)
        device_hit = min(match.device_tokens // page * page, max_hit)
        hit = min(match.tokens // page * page, max_hit)
        load_tokens = match.tokens - match.device_tokens if hit > device_hit else 0
        if load_tokens < max(1, self._config.load_back_threshold_tokens):
            hit, load_tokens = device_hit, 0
        needed_tokens = load_tokens + job.target_tokens - hit
        if needed_tokens + reserved_output(job) + page >= tree.available_tokens - reserved_tokens:
            tree.unlock(match.node)
            self._prefixes.record_match(job, match.node)
            return None
        if load_tokens:
            missing_tokens = load_tokens - tree.free_tokens
            if missing_tokens > 0:
                tree.evict_device(missing_tokens)
            tree.load(match.node)
            anchor = match.node
        else:
            anchor = match.device_node
            if anchor is not match.node:
                tree.lock(anchor)
                tree.unlock(match.node)
        job.leaf = anchor
        new_tokens = min(job.target_tokens - hit, chunk_tokens_left)
        if hit + new_tokens < job.target_tokens:
            new_tokens = max((hit + new_tokens) // page * page - hit, min(page, new_tokens))
        if job.target_tokens == job.prompt_tokens:
            job.device_hit_tokens, job.host_hit_tokens = device_hit, hit - device_hit
            if job.disk_hit_tokens:
                # The part of the host hit that was prefetched from the disk.
                disk_end = min(job.disk_start_token + job.disk_hit_tokens, hit)
                job.disk_hit_tokens = max(0, disk_end - max(job.disk_start_token, device_hit))
        job.kv_tokens = hit
        self._claim(job, new_tokens)
        return new_tokens, load_tokens

    def _uncached_tokens(self, job: SimulatedRequest) -> int:
        cached = self._queue.match_cached(job)
        return job.target_tokens - cached.device - cached.host

    def _claim(self, job: SimulatedRequest, tokens: int) -> None:
        self._tree.claim(tokens)
        job.private_tokens += tokens

    def _check_fits(self, job: SimulatedRequest) -> None:
        """Raise ``CanopyError`` if ``job`` exceeds an empty instance."""
        needed_tokens = job.target_tokens + reserved_output(job) + self._config.page_tokens
        if needed_tokens < self._config.device_tokens:
            return
        raise CanopyError(
            f"request {job.index + 1} needs {needed_tokens} tokens of device memory (prompt and output), "
            f"device_tokens is {self._config.device_tokens}; give more, or leave the request out"
        )
