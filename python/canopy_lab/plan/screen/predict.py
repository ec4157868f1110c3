"""Rows of configurations that nobody has simulated, from hits and a replayed queue."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from canopy_lab.plan.backend import Done, Inline, Item
from canopy_lab.plan.objective import Metric
from canopy_lab.plan.screen.replay import Replayed
from canopy_lab.plan.screen.traffic import Part, replay_part, tokens_of
from canopy_lab.plan.space import Configuration
from canopy_lab.plan.system import row_of
from canopy_lab.plan.worker import PlanInputs

PREDICTED = frozenset(
    (
        "mean_ttft_s", "p50_ttft_s", "p90_ttft_s", "p99_ttft_s", "throughput_tokens_per_s",
        "token_hit_ratio", "cost", "cost_per_hour",
    )
)  # fmt: skip
"""Metrics that a predicted row has, by key."""
_CELLS = 10_000_000
"""Requests times configurations that are replayed side by side."""
_QUANTILES = {"p50_ttft_s": 50, "p90_ttft_s": 90, "p99_ttft_s": 99}


def can_predict(c: Configuration, metrics: Sequence[Metric] = ()) -> bool:
    """Whether ``Predictor`` knows the policies of ``c``, and ``metrics``: LRU without TTLs, copied
    to the host at once, first come, first served. The others are simulated in full."""
    plain = Configuration()
    same = all(
        getattr(c, name) == getattr(plain, name)
        for name in ("ttl", "device_policy", "host_policy", "disk_policy", "write_policy",
                     "schedule_policy")
    )  # fmt: skip
    return same and all(m.key in PREDICTED for m in metrics)


class Mapper(Protocol):
    """What runs the parts of a prediction (``backend.py``)."""

    def map(
        self, run: Callable[[PlanInputs, Item], Done], items: Sequence[Item]
    ) -> Iterator[tuple[int, Done]]: ...


class Predictor:
    """Predicts on one trace. Rows have the keys of ``PREDICTED``, and those that their cost needs.

    ``on`` runs its parts, by default this process, ``jobs`` of them at a time.
    """

    def __init__(self, work: PlanInputs, on: Mapper | None = None, jobs: int = 1) -> None:
        self._work = work
        self._on: Mapper = Inline(work) if on is None else on
        self._jobs = jobs
        self._prompts, self._outputs = tokens_of(work.trace)
        self._begin = work.trace[0].time_s

    def __call__(self, configurations: Sequence[Configuration]) -> list[dict[str, Any]]:
        """A row for each, in order."""
        passes: list[list[int]] = []
        for instances in sorted({c.instances for c in configurations}):
            at = [i for i, c in enumerate(configurations) if c.instances == instances]
            # Each instance replays its own requests: a pass is as wide as memory allows, since its
            # time grows more slowly than its width, and no wider than gives each process one.
            step = max(64, _CELLS * instances // max(len(self._prompts), 1))
            step = min(step, max(64, math.ceil(len(at) * instances / self._jobs)))
            passes += [at[begin : begin + step] for begin in range(0, len(at), step)]
        rows: list[dict[str, Any]] = [{}] * len(configurations)
        parts, of = [], []
        for n, at in enumerate(passes):
            some = tuple(configurations[i] for i in at)
            parts += [Part(some, some[0].instances, k) for k in range(some[0].instances)]
            of += [n] * some[0].instances
        under_way: dict[int, _Sums] = {}
        for which, (mine, got) in self._on.map(replay_part, parts):
            n, part = of[which], parts[which]
            width = len(part.configurations)
            sums = under_way.setdefault(n, _Sums(len(self._prompts), width, part.instances))
            sums.add(mine, got)
            if not sums.missing:
                done = self._rows(part.configurations, under_way.pop(n))
                for i, row in zip(passes[n], done):
                    rows[i] = row
        return rows

    def _rows(self, some: Sequence[Configuration], sums: _Sums) -> list[dict[str, Any]]:
        ttft, hits, written = sums.ttft, sums.hits, sums.written
        span = sums.end - self._begin
        total = float(self._prompts.sum())
        served = total + float(self._outputs.sum())
        quantiles = np.percentile(ttft, list(_QUANTILES.values()), axis=0)
        means = ttft.mean(axis=0, dtype=np.float64)
        prices, kv = self._work.prices, float(self._work.engine.profile.kv_bytes_per_token)
        rows = []
        for at, c in enumerate(some):
            share = hits[:, at] / total
            held = min(c.disk_gib * 2.0**30 * prices.disks_of(c.disk, c.instances), written[at] * kv) if c.disk else 0.0  # fmt: skip
            metrics = {
                "requests": len(ttft),
                "mean_ttft_s": float(means[at]),
                **{name: float(q[at]) for name, q in zip(_QUANTILES, quantiles)},
                "throughput_tokens_per_s": served / float(span[at]),
                "makespan_s": float(span[at]),
                "token_hit_ratio": float(share.sum()),
                "token_hit_ratio_by_tier": dict(zip(("device", "host", "disk"), share.tolist())),
                "mean_bytes_by_tier": {"disk": held},
                "disk_read_bytes": float(hits[2, at]) * kv,
                "disk_written_bytes": float(written[at]) * kv,
            }
            rows.append(row_of(c, metrics, prices, kv))
        return rows


class _Sums:
    """What came of all instances, a column a configuration. missing: instances still to come."""

    def __init__(self, requests: int, width: int, missing: int) -> None:
        self.missing = missing
        self.ttft = np.zeros((requests, width), np.float32)
        self.hits = np.zeros((3, width))
        self.written, self.end = np.zeros(width), np.full(width, -math.inf)

    def add(self, mine: NDArray[np.int64], got: Replayed | None) -> None:
        self.missing -= 1
        if got is None:
            return
        self.ttft[mine] = got.ttft
        self.hits += got.hits
        self.written += got.written
        self.end = np.maximum(self.end, got.end)
