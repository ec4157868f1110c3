"""Waiting requests of one instance: held by the session gate, and queued."""

from __future__ import annotations

import math
from collections.abc import Sequence

from canopy_lab.sim.system.channel import Link
from canopy_lab.sim.system.gate import OpenGate
from canopy_lab.sim.system.job import SimulatedRequest
from canopy_lab.sim.system.queue_order import (
    BoundedShortestFirst,
    CachedTokens,
    QueueOrder,
    ShortestPrefillFirst,
)
from canopy_lab.sim.system.step_costs import StepCosts
from canopy_lab.sim.system.tree import TieredTree
from canopy_lab.sim.system.waiting import WaitingPrefixes


class Queue:
    """Waiting jobs in order; implements ``QueueView`` for the queue orders."""

    def __init__(
        self,
        tree: TieredTree,
        costs: StepCosts,
        host_link: Link | None,
        page_tokens: int,
        order: QueueOrder,
        gate: OpenGate,
        prefixes: WaitingPrefixes,
        step_tokens: int,
    ) -> None:
        self.step_tokens = step_tokens
        self._tree = tree
        self._costs = costs
        self._host_link = host_link
        self.unbacked_tokens = math.inf if host_link is not None else tree.device_tokens
        self._page_tokens = page_tokens
        self._order = order
        self._gate = gate
        self._prefixes = prefixes
        self._was_matched = False
        self.jobs: list[SimulatedRequest] = []
        self.held_jobs: list[SimulatedRequest] = []
        """Jobs held by the gate, oldest first."""
        self.now = 0.0
        self.processed_tokens = 0

    def __len__(self) -> int:
        return len(self.jobs)

    # ---- arrivals and departures ----

    def arrive(self, job: SimulatedRequest, now: float) -> bool:
        """Add an arriving job; return False if the gate holds it."""
        if not self._gate.enter(job.index, job.request, now):
            self.held_jobs.append(job)
            return False
        self._append(job, now)
        return True

    def offer_held(self, now: float) -> list[SimulatedRequest]:
        """Offer held jobs to the gate again; return the admitted jobs."""
        admitted, refused = [], []
        for job in self.held_jobs:
            if self._gate.enter(job.index, job.request, now):
                self._append(job, now)
                admitted.append(job)
            else:
                refused.append(job)
        self.held_jobs = refused
        return admitted

    def gate_due(self, now: float) -> float:
        """Return the time of the next ``offer_held``; infinity if no job is held."""
        return self._gate.wake_at(now) if self.held_jobs else math.inf

    def record_end(self, job: SimulatedRequest, now: float) -> None:
        if isinstance(self._order, BoundedShortestFirst):
            self._order.forget(job)
        self._gate.record_end(job.index, job.request, now)

    def readd(self, job: SimulatedRequest) -> None:
        self.jobs.append(job)

    def admit(self, jobs: Sequence[SimulatedRequest]) -> None:
        admitted = frozenset(jobs)
        self.jobs = [job for job in self.jobs if job not in admitted]
        if isinstance(self._order, BoundedShortestFirst):
            self._order.admit(jobs)

    def _append(self, job: SimulatedRequest, now: float) -> None:
        job.queued_s = now
        job.tokens_before = self.processed_tokens
        self.jobs.append(job)

    # ---- the order ----

    def sort(self, now: float, computing: Sequence[SimulatedRequest] = ()) -> None:
        """Sort the queue for a step that may admit jobs. ``computing``: the chunked prefill."""
        self.now, self._was_matched = now, False
        if self.jobs:
            self._oldest_sessions_first()
            if isinstance(self._order, BoundedShortestFirst):
                chunked = computing[0] if computing else None
                self.jobs = list(self._order.order(self.jobs, self, chunked))
                self._order.defer()
            else:
                self.jobs = list(self._order.order(self.jobs, self))
        self._prefixes.before_step(self.jobs, self._was_matched)

    def share_step(self, remaining_tokens: int, page: int, step_tokens: int) -> int | None:
        """Return the step's tokens for a chunked prefill with ``remaining_tokens`` left, or ``None``.

        ``None`` means no limit. Jobs that share the step move to the head of the queue.
        """
        if not self.jobs or not isinstance(
            self._order, BoundedShortestFirst | ShortestPrefillFirst
        ):
            return None
        jobs, limit = self._order.share_step(remaining_tokens, step_tokens, page, self.jobs)
        self.jobs = list(jobs)
        return limit

    @property
    def deferred(self) -> frozenset[SimulatedRequest]:
        """Return the jobs that the order defers in this step."""
        if self.jobs and isinstance(self._order, BoundedShortestFirst):
            return self._order.deferred
        return frozenset()

    def _oldest_sessions_first(self) -> None:
        """Sort by the gate's seniority, if it has one. The sort is stable."""
        seniority = {job.index: self._gate.seniority(job.index) for job in self.jobs}
        self.jobs.sort(key=lambda job: seniority[job.index] or 0)

    def match_cached(self, job: SimulatedRequest) -> CachedTokens:
        self._was_matched = True
        tree, page = self._tree, self._page_tokens
        match = tree.match(job.path_of_prompt(tree.block_tokens))
        self._prefixes.record_match(job, match.node)
        max_hit = (job.target_tokens - 1) // page * page
        device = min(match.device_tokens // page * page, max_hit)
        return CachedTokens(device, min(match.tokens // page * page, max_hit) - device)

    def marginal_s(self, new_tokens: int, context_tokens: int) -> float:
        return self._costs.marginal_s(new_tokens, context_tokens, self.step_tokens)

    def load_s(self, tokens: int) -> float:
        if self._host_link is None:
            return 0.0
        return self._host_link.read_s(tokens * self._costs.kv_bytes)
