"""The room that SGLang keeps free for outputs whose length it does not know.

A request is let in when its prompt and all that its client allows it to generate fit into what is
left beside a share of what running requests may still generate. The share, ``new_token_ratio``,
begins at ``INIT_RATIO``, falls with every decode step, and is estimated anew when it was too low and
requests had to be sent back (``managers/schedule_policy.py``, ``PrefillAdder``, and
``scheduler_components/new_token_ratio_tracker.py`` of SGLang 0.5.23). Of a client that fixes its
outputs (``ignore_eos``) the whole is kept.
"""

from __future__ import annotations

import heapq
import itertools

from canopy_lab.sim.system.job import SimulatedRequest

CLIP_OUTPUT_TOKENS = 4096
"""SGLang reserves room for no more output than this (``CLIP_MAX_NEW_TOKENS``)."""
RETRACT_DECODE_STEPS = 20
"""Decode steps for which a retraction makes room (``SGLANG_RETRACT_DECODE_STEPS``)."""
INIT_RATIO = 0.7
"""``SGLANG_INIT_NEW_TOKEN_RATIO``; times ``--schedule-conservativeness``, at most 1."""
LEAST_SHARE = 0.14
"""Of it the ratio keeps so much (``SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR``)."""
DECAY_STEPS = 600
"""Decode steps in which it falls so far (``SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS``)."""


class NewTokenRatio:
    """The share of what running requests may still generate that is kept free."""

    def __init__(self, conservativeness: float = 1.0) -> None:
        self._first = min(INIT_RATIO * conservativeness, 1.0)
        self._least = self._first * LEAST_SHARE
        self._decay = (self._first - self._least) / DECAY_STEPS
        self.current = self._first

    def decoded(self, steps: int) -> None:
        """So many decode steps went by, none of which had too little room."""
        if self.current > self._least:
            self.current = max(self.current - steps * self._decay, self._least)

    def retracted(self, made_tokens: int, limit_tokens: int, jobs: int) -> None:
        """Requests were sent back. The ``jobs`` that are left have generated and were allowed so
        many tokens in all."""
        expected = made_tokens + RETRACT_DECODE_STEPS * jobs
        self.current = min(1.0, expected / (limit_tokens + 1))

    def reset(self) -> None:
        """Nothing runs and nobody waits."""
        self.current = self._first


class Reservation:
    """What running jobs may still generate, each up to ``CLIP_OUTPUT_TOKENS``, in one sum.

    Times are decode steps of the batch, in which every job generates a token.
    """

    def __init__(self) -> None:
        self._ends_sum = 0
        self._counted = 0
        self._clipped = 0
        self._to_clip: list[tuple[int, int, SimulatedRequest]] = []
        """Heap of (step at which a clipped job has few enough left, sequence, job)."""
        self._numbers = itertools.count()

    def add(self, job: SimulatedRequest, end: int, now: int) -> None:
        """``job`` runs and may generate until step ``end``."""
        job.may_end = end
        job.clipped = end - now > CLIP_OUTPUT_TOKENS
        if job.clipped:
            self._clipped += 1
            heapq.heappush(self._to_clip, (end - CLIP_OUTPUT_TOKENS, next(self._numbers), job))
        else:
            self._counted += 1
            self._ends_sum += end

    def remove(self, job: SimulatedRequest) -> None:
        """``job`` runs no longer."""
        if job.clipped:
            self._clipped -= 1
            job.clipped = False
        else:
            self._counted -= 1
            self._ends_sum -= job.may_end

    def tokens(self, now: int) -> int:
        """The sum at step ``now``."""
        heap = self._to_clip
        while heap and heap[0][0] <= now:
            since, _, job = heapq.heappop(heap)
            if job.clipped and job.may_end - CLIP_OUTPUT_TOKENS == since:
                job.clipped = False
                self._clipped -= 1
                self._counted += 1
                self._ends_sum += job.may_end
        return self._ends_sum - self._counted * now + self._clipped * CLIP_OUTPUT_TOKENS


def reserved_output(job: SimulatedRequest) -> int:
    """Tokens that are kept for a job that is let in."""
    return min(max(job.max_new - (job.target - job.prompt), 0), CLIP_OUTPUT_TOKENS)
