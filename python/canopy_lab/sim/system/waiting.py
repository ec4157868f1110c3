"""Protect the cached prefixes of waiting requests from eviction.

``ProtectedPrefixes`` is Canopy's live tree (``radix/protected.py``): a request that
is matched but not admitted protects the deepest node of its path for a minute, within a budget.
Arrivals are matched, and the budget is spent from the head of the queue.

``TouchedPrefixes`` is SGLang's ``lru``: each match and insertion makes a path the most recent, and
before every 32nd step that may admit requests the paths of the first 128 waiting requests are
touched, the head last (``SchedulePolicy._touch_waiting_prefixes``).
"""

from __future__ import annotations

from collections.abc import Sequence

from canopy_lab.sim.system.job import SimulatedRequest
from canopy_lab.sim.system.nodes import TierNode, TierNodes
from sglang_canopy.records import Request

REFRESH_STEPS = 32
"""Steps between two refreshes (``WAITING_PREFIX_REFRESH_INTERVAL``)."""
MAX_REFRESHED_JOBS = 128
"""Requests per refresh (``WAITING_QUEUE_PREFIX_MATCH_MAX``)."""


class WaitingPrefixes:
    """Receives matches, steps and uses in the tree of one instance."""

    def __init__(self, tree: TierNodes) -> None:
        self.tree = tree

    def record_match(self, job: SimulatedRequest, node: TierNode) -> None:
        """Record that ``job`` was matched up to ``node`` and remains queued."""

    def before_step(self, waiting: Sequence[SimulatedRequest], was_matched: bool) -> None:
        """Prepare a step that may admit jobs. ``was_matched``: the order matched the queue."""

    def record_use(self, leaf: TierNode, request: Request) -> None:
        """Record that ``request`` marked the path to ``leaf``, which is locked."""


class ProtectedPrefixes(WaitingPrefixes):
    """Matches arrivals; every 32nd step the budget is assigned again from the head of the queue."""

    def __init__(self, tree: TierNodes) -> None:
        super().__init__(tree)
        self._steps = 0
        self._protected_jobs: set[SimulatedRequest] = set()

    def record_match(self, job: SimulatedRequest, node: TierNode) -> None:
        self.tree.protect(node, job.request.tenant)

    def before_step(self, waiting: Sequence[SimulatedRequest], was_matched: bool) -> None:
        if not waiting:
            self._protected_jobs.clear()
            return
        is_refresh = self._steps % REFRESH_STEPS == 0
        self._steps += 1
        if is_refresh:
            self._protected_jobs = set(waiting)
            self.tree.replace_protection(
                [(self.path_end(job), job.request.tenant) for job in waiting[:MAX_REFRESHED_JOBS]]
            )
            return
        for job in reversed(waiting):  # newer jobs are at the end, or were matched
            if job not in self._protected_jobs:
                self._protected_jobs.add(job)
                self.tree.protect(self.path_end(job), job.request.tenant)

    def path_end(self, job: SimulatedRequest) -> TierNode:
        """Return the deepest cached node of ``job``'s path."""
        tree = self.tree
        return tree.match(job.path, None, job.blocks_of(job.target_tokens, tree.block_tokens)).node


class TouchedPrefixes(WaitingPrefixes):
    """Touches matched paths, as SGLang with ``lru``."""

    def __init__(self, tree: TierNodes) -> None:
        super().__init__(tree)
        self._steps = 0

    def record_match(self, job: SimulatedRequest, node: TierNode) -> None:
        self.tree.touch(node)

    def record_use(self, leaf: TierNode, request: Request) -> None:
        self.tree.touch(leaf)

    def before_step(self, waiting: Sequence[SimulatedRequest], was_matched: bool) -> None:
        if was_matched or not waiting:
            return
        is_refresh = self._steps % REFRESH_STEPS == 0
        self._steps += 1
        if is_refresh:
            for job in reversed(waiting[:MAX_REFRESHED_JOBS]):
                self.tree.touch(self.tree.match(job.path_of_prompt(self.tree.block_tokens)).node)
