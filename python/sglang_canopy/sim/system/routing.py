"""Which instance a request goes to."""

from __future__ import annotations

import random
from collections.abc import Sequence

from sglang_canopy.sim.system.instance import Instance
from sglang_canopy.sim.system.job import SimulatedRequest

_MATCH_SHARE = 0.5
"""Prefix-aware: follow a cached prefix that covers this much of the prompt."""
_IMBALANCE_REQUESTS = 32
_IMBALANCE_RATIO = 1.0001
"""Prefix-aware: beyond both, load goes first (defaults of SGLang's router)."""


class Router:
    """``round-robin``, ``least-loaded`` (fewest tokens outstanding) or ``prefix-aware``.

    Ties are broken at random, from ``seed``.
    """

    def __init__(self, name: str, instances: Sequence[Instance], seed: int) -> None:
        self._name = name
        self._instances = instances
        self._next = 0
        self._draw = random.Random(seed)

    def choose(self, job: SimulatedRequest) -> int:
        """The number of the instance that gets ``job``."""
        count = len(self._instances)
        if count == 1:
            return 0
        if self._name == "round-robin":
            chosen = self._next
            self._next = (chosen + 1) % count
            return chosen
        if self._name == "least-loaded":
            return self._least([i.outstanding for i in self._instances])
        return self._by_prefix(job)

    def _by_prefix(self, job: SimulatedRequest) -> int:
        requests = [i.requests for i in self._instances]
        most, fewest = max(requests), min(requests)
        if most - fewest > _IMBALANCE_REQUESTS and most > fewest * _IMBALANCE_RATIO:
            return self._least([float(n) for n in requests])
        path = job.request.path
        cached = [i.tree.peek(tuple(path)) for i in self._instances]
        longest = max(cached)
        if path and longest / len(path) > _MATCH_SHARE:
            return cached.index(longest)
        # An unknown prefix goes where the least is cached.
        return self._least([float(i.tree.device_used) for i in self._instances])

    def _least(self, loads: Sequence[float]) -> int:
        least = min(loads)
        ties = [i for i, load in enumerate(loads) if load == least]
        return ties[0] if len(ties) == 1 else self._draw.choice(ties)
