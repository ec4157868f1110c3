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
from canopy_lab.sim.system.step_costs import Costs
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
        costs: Costs,
        ratio: NewTokenRatio | None = None,
        fixed_outputs: bool = False,
    ) -> None:
        self.ratio = ratio if ratio is not None else NewTokenRatio()
        self._fixed_outputs = fixed_outputs
        self._reservation = Reservation()
        self._tree = tree
        self._costs = costs
        self.jobs: list[DecodingJob] = []
        """A heap."""
        self._steps = 0
        self._context_tokens = 0
        """Tokens of all jobs."""
        self.segment: DecodeSegment | None = None
        self._claimed = False
        self.retractions = 0
        self._sequence = itertools.count()

    def __len__(self) -> int:
        return len(self.jobs)

    def reserved_tokens(self) -> float:
        share = 1.0 if self._fixed_outputs else self.ratio.current
        return self._reservation.tokens(self._steps) * share

    def add(self, job: SimulatedRequest, remaining_steps: int) -> None:
        end_step = self._steps + remaining_steps
        heapq.heappush(self.jobs, DecodingJob(end_step, next(self._sequence), job))
        self._reservation.add(job, end_step + job.max_new - job.output, self._steps)
        self._context_tokens += job.target + 1

    def plan(self, now_s: float) -> list[SimulatedRequest]:
        """Begin a segment; return the jobs retracted for lack of memory, least output first."""
        tree, retracted = self._tree, []
        room_steps = (tree.free + tree.evictable) // len(self.jobs)
        while room_steps < 1 and len(self.jobs) > 1:
            retracted.append(self._retract())
            room_steps = (tree.free + tree.evictable) // len(self.jobs)
        if retracted:
            generated = sum([self._generated_tokens(entry) for entry in self.jobs])
            limits = sum([entry.job.max_new for entry in self.jobs])
            self.ratio.record_retraction(generated, limits, len(self.jobs))
        self._plan_segment(now_s, max(1, min(self.jobs[0].end_step - self._steps, room_steps)))
        return retracted

    def interrupt(self, now_s: float) -> bool:
        """End the segment after the current step; return True if that changed its end."""
        if self.segment is None or now_s >= self.segment.end_s:
            return False
        start_s, steps, end_s = self.segment
        batch = len(self.jobs)
        mean_tokens = self._context_tokens / batch
        # Steps take about equally long, so the share of time estimates the share of steps.
        elapsed_s = now_s - start_s
        kept_steps = max(1, math.ceil(elapsed_s / (end_s - start_s) * steps))
        while kept_steps < steps and self._costs.decode(batch, mean_tokens, kept_steps) < elapsed_s:
            kept_steps += 1
        if kept_steps < steps:
            self._plan_segment(start_s, kept_steps)
        return kept_steps < steps

    def claim(self) -> None:
        """Allocate the segment's generated tokens, once."""
        assert self.segment is not None
        if not self._claimed:
            self._tree.claim(len(self.jobs) * self.segment.steps)
            self._claimed = True

    def finish_segment(self) -> tuple[DecodeSegment, list[SimulatedRequest]]:
        """Finish the segment; return it and the jobs that end with it."""
        self.claim()
        assert self.segment is not None
        segment, self.segment, self._claimed = self.segment, None, False
        finished: list[SimulatedRequest] = []
        self._steps += segment.steps
        self.ratio.record_decode(segment.steps)
        self._context_tokens += len(self.jobs) * segment.steps
        while self.jobs and self.jobs[0].end_step <= self._steps:
            job = heapq.heappop(self.jobs).job
            self._reservation.remove(job)
            self._context_tokens -= job.prompt + job.output
            # The job's share of the allocated tokens; the last token has no KV.
            job.private += job.output - 1 - (job.target - job.prompt)
            finished.append(job)
        return segment, finished

    def _plan_segment(self, start_s: float, steps: int) -> None:
        batch = len(self.jobs)
        duration_s = self._costs.decode(batch, self._context_tokens / batch, steps)
        self.segment = DecodeSegment(start_s, steps, start_s + duration_s)

    def _retract(self) -> SimulatedRequest:
        """Retract the job with the least output; free its memory and room for further steps."""
        entry = min(self.jobs, key=lambda entry: (self._generated_tokens(entry), -entry.job.prompt))
        job, generated = entry.job, self._generated_tokens(entry)
        self.jobs.remove(entry)
        heapq.heapify(self.jobs)
        self._reservation.remove(job)
        self._context_tokens -= job.prompt + generated
        self.retractions += 1
        job.private += generated - 1 - (job.target - job.prompt)
        self._tree.private -= job.private
        job.private = 0
        if job.leaf is not None:
            self._tree.unlock(job.leaf)
            job.leaf = None
        missing_tokens = len(self.jobs) * RETRACT_DECODE_STEPS - self._tree.free
        if missing_tokens > 0:
            self._tree.evict_device(missing_tokens)
        job.target = job.prompt + generated
        job.kv_tokens = 0
        return job

    def _generated_tokens(self, entry: DecodingJob) -> int:
        """Return the tokens that a running job has generated."""
        return entry.job.output - (entry.end_step - self._steps)
