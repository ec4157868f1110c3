"""The running batch of one instance and its decode steps.

Steps are simulated in *segments*: a batch decodes until the next event that changes it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from typing import NamedTuple

from canopy_lab.sim.system.job import SimulatedRequest
from canopy_lab.sim.system.reservation import RETRACT_DECODE_STEPS, NewTokenRatio, Reservation
from canopy_lab.sim.system.step_costs import StepCosts
from canopy_lab.sim.system.tree import TieredTree


class DecodeSegment(NamedTuple):
    """Decode steps of an unchanged batch. Times in seconds."""

    begin_s: float
    steps: int
    end_s: float


class DecodingJob(NamedTuple):
    """A job in the heap of a batch: the first to finish is at its head."""

    end_step: int
    sequence: int
    job: SimulatedRequest


class RunningBatch:
    """The requests that decode together."""

    def __init__(
        self,
        tree: TieredTree,
        costs: StepCosts,
        new_token_ratio: NewTokenRatio | None = None,
        fixed_outputs: bool = False,
    ) -> None:
        self.new_token_ratio = new_token_ratio if new_token_ratio is not None else NewTokenRatio()
        self._fixed_outputs = fixed_outputs
        self._reservation = Reservation()
        self._tree = tree
        self._costs = costs
        self.jobs: list[DecodingJob] = []
        """A heap."""
        self._step = 0
        self._batch_tokens = 0
        """Tokens of all jobs."""
        self.segment: DecodeSegment | None = None
        self._is_claimed = False
        self.retractions = 0
        self._sequence = itertools.count()

    def __len__(self) -> int:
        return len(self.jobs)

    def reserved_tokens(self) -> float:
        reserved_share = 1.0 if self._fixed_outputs else self.new_token_ratio.current
        return self._reservation.tokens(self._step) * reserved_share

    def add(self, job: SimulatedRequest, remaining_steps: int) -> None:
        end_step = self._step + remaining_steps
        heapq.heappush(self.jobs, DecodingJob(end_step, next(self._sequence), job))
        self._reservation.add(job, end_step + job.max_new_tokens - job.output_tokens, self._step)
        self._batch_tokens += job.target_tokens + 1

    def plan(self, now_s: float) -> list[SimulatedRequest]:
        """Begin a segment; return the jobs retracted for lack of memory, least output first."""
        tree, retracted = self._tree, []
        room_steps = tree.available_tokens // len(self.jobs)
        while room_steps < 1 and len(self.jobs) > 1:
            retracted.append(self._retract())
            room_steps = tree.available_tokens // len(self.jobs)
        if retracted:
            generated_tokens = sum([self._generated_tokens(entry) for entry in self.jobs])
            max_new_tokens = sum([entry.job.max_new_tokens for entry in self.jobs])
            self.new_token_ratio.record_retraction(generated_tokens, max_new_tokens, len(self.jobs))
        self._plan_segment(now_s, max(1, min(self.jobs[0].end_step - self._step, room_steps)))
        return retracted

    def interrupt(self, now_s: float) -> bool:
        """End the segment after the current step; return True if that changed its end."""
        if self.segment is None or now_s >= self.segment.end_s:
            return False
        start_s, steps, end_s = self.segment
        jobs, costs = len(self.jobs), self._costs
        mean_tokens = self._batch_tokens / jobs
        # Steps take about equally long, so the share of time estimates the share of steps.
        elapsed_s = now_s - start_s
        kept_steps = max(1, math.ceil(elapsed_s / (end_s - start_s) * steps))
        while kept_steps < steps and costs.decode_s(jobs, mean_tokens, kept_steps) < elapsed_s:
            kept_steps += 1
        if kept_steps < steps:
            self._plan_segment(start_s, kept_steps)
        return kept_steps < steps

    def claim(self) -> None:
        """Allocate the segment's generated tokens, once."""
        assert self.segment is not None
        if not self._is_claimed:
            self._tree.claim(len(self.jobs) * self.segment.steps)
            self._is_claimed = True

    def finish_segment(self) -> tuple[DecodeSegment, list[SimulatedRequest]]:
        """Finish the segment; return it and the jobs that end with it."""
        self.claim()
        assert self.segment is not None
        segment, self.segment, self._is_claimed = self.segment, None, False
        finished: list[SimulatedRequest] = []
        self._step += segment.steps
        self.new_token_ratio.record_decode(segment.steps)
        self._batch_tokens += len(self.jobs) * segment.steps
        while self.jobs and self.jobs[0].end_step <= self._step:
            job = heapq.heappop(self.jobs).job
            self._reservation.remove(job)
            self._batch_tokens -= job.prompt_tokens + job.output_tokens
            # The job's share of the allocated tokens; the last token has no KV.
            job.private_tokens += job.output_tokens - 1 - (job.target_tokens - job.prompt_tokens)
            finished.append(job)
        return segment, finished

    def _plan_segment(self, start_s: float, steps: int) -> None:
        batch_size = len(self.jobs)
        duration_s = self._costs.decode_s(batch_size, self._batch_tokens / batch_size, steps)
        self.segment = DecodeSegment(start_s, steps, start_s + duration_s)

    def _retract(self) -> SimulatedRequest:
        """Retract the job with the least output; free its memory and room for further steps."""
        entry = min(self.jobs, key=lambda e: (self._generated_tokens(e), -e.job.prompt_tokens))
        job, generated_tokens = entry.job, self._generated_tokens(entry)
        self.jobs.remove(entry)
        heapq.heapify(self.jobs)
        self._reservation.remove(job)
        self._batch_tokens -= job.prompt_tokens + generated_tokens
        self.retractions += 1
        job.private_tokens += generated_tokens - 1 - (job.target_tokens - job.prompt_tokens)
        self._tree.private_tokens -= job.private_tokens
        job.private_tokens = 0
        if job.leaf is not None:
            self._tree.unlock(job.leaf)
            job.leaf = None
        missing_tokens = len(self.jobs) * RETRACT_DECODE_STEPS - self._tree.free_tokens
        if missing_tokens > 0:
            self._tree.evict_device(missing_tokens)
        job.target_tokens = job.prompt_tokens + generated_tokens
        job.kv_tokens = 0
        return job

    def _generated_tokens(self, entry: DecodingJob) -> int:
        """Return the tokens that a running job has generated."""
        return entry.job.output_tokens - (entry.end_step - self._step)
