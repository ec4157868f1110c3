"""Memory that SGLang reserves for outputs of unknown length.

A request is admitted if its prompt and ``max_tokens`` fit in addition to a share of the output that
running requests may still generate. This share, ``new_token_ratio``, starts at ``INIT_RATIO``, falls
with every decode step, and is estimated again after a retraction (``managers/schedule_policy.py``,
``PrefillAdder``, and ``scheduler_components/new_token_ratio_tracker.py`` of SGLang 0.5.23). Outputs of
fixed length (``ignore_eos``) are reserved in full.
"""

from __future__ import annotations

import heapq
import itertools

from canopy_lab.sim.system.job import SimulatedRequest

CLIP_OUTPUT_TOKENS = 4096
"""Maximum output tokens reserved per request (``CLIP_MAX_NEW_TOKENS``)."""
RETRACT_DECODE_STEPS = 20
"""Decode steps to make room for on retraction (``SGLANG_RETRACT_DECODE_STEPS``)."""
INIT_RATIO = 0.7
"""``SGLANG_INIT_NEW_TOKEN_RATIO``; times ``--schedule-conservativeness``, at most 1."""
MIN_RATIO_SHARE = 0.14
"""Minimum of the ratio, as a share of its start (``SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR``)."""
DECAY_STEPS = 600
"""Decode steps from the start to the minimum (``SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS``)."""


class NewTokenRatio:
    """Reserved share of the running requests' remaining output."""

    def __init__(self, conservativeness: float = 1.0) -> None:
        self._start_ratio = min(INIT_RATIO * conservativeness, 1.0)
        self._min_ratio = self._start_ratio * MIN_RATIO_SHARE
        self._decay = (self._start_ratio - self._min_ratio) / DECAY_STEPS
        self.current = self._start_ratio

    def record_decode(self, steps: int) -> None:
        """Decay the ratio after ``steps`` decode steps without a retraction."""
        if self.current > self._min_ratio:
            self.current = max(self.current - steps * self._decay, self._min_ratio)

    def record_retraction(self, generated_tokens: int, max_tokens: int, job_count: int) -> None:
        """Estimate the ratio after a retraction.

        ``generated_tokens``, ``max_tokens``: generated and maximum output of the remaining ``job_count``.
        """
        expected_tokens = generated_tokens + RETRACT_DECODE_STEPS * job_count
        self.current = min(1.0, expected_tokens / (max_tokens + 1))

    def reset(self) -> None:
        """Return to the start; called when the instance is idle."""
        self.current = self._start_ratio


class Reservation:
    """Sum of the running jobs' remaining output, each up to ``CLIP_OUTPUT_TOKENS``.

    Times are decode steps of the batch; every job generates one token per step.
    """

    def __init__(self) -> None:
        self._ends_sum = 0
        self._exact_jobs = 0
        self._clipped_jobs = 0
        self._to_clip: list[tuple[int, int, SimulatedRequest]] = []
        """Heap of (step at which a job is no longer clipped, sequence, job)."""
        self._numbers = itertools.count()

    def add(self, job: SimulatedRequest, end_step: int, step: int) -> None:
        """Add a job that may generate until step ``end_step``."""
        job.limit_step = end_step
        job.is_clipped = end_step - step > CLIP_OUTPUT_TOKENS
        if job.is_clipped:
            self._clipped_jobs += 1
            heapq.heappush(self._to_clip, (end_step - CLIP_OUTPUT_TOKENS, next(self._numbers), job))
        else:
            self._exact_jobs += 1
            self._ends_sum += end_step

    def remove(self, job: SimulatedRequest) -> None:
        if job.is_clipped:
            self._clipped_jobs -= 1
            job.is_clipped = False
        else:
            self._exact_jobs -= 1
            self._ends_sum -= job.limit_step

    def tokens(self, step: int) -> int:
        """Return the sum at step ``step``."""
        heap = self._to_clip
        while heap and heap[0][0] <= step:
            clip_step, _, job = heapq.heappop(heap)
            if job.is_clipped and job.limit_step - CLIP_OUTPUT_TOKENS == clip_step:
                job.is_clipped = False
                self._clipped_jobs -= 1
                self._exact_jobs += 1
                self._ends_sum += job.limit_step
        return self._ends_sum - self._exact_jobs * step + self._clipped_jobs * CLIP_OUTPUT_TOKENS


def reserved_output(job: SimulatedRequest) -> int:
    """Return the output tokens to reserve for an admitted job."""
    generated_tokens = job.target_tokens - job.prompt_tokens
    return min(max(job.max_new_tokens - generated_tokens, 0), CLIP_OUTPUT_TOKENS)
