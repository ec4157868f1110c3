"""Evaluate configurations, from the cache or by simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from canopy_lab.plan.cache import Cache, code_digest, digest, trace_digest
from canopy_lab.plan.objective import Row
from canopy_lab.plan.space import GROUP, Configuration
from canopy_lab.plan.system import least_cost, row_of, system_of
from canopy_lab.plan.uncertainty import conversations_of
from canopy_lab.plan.worker import PlanInputs, SimulationTask, run_in_full, simulated
from canopy_lab.sim.system.result import SystemResult
from canopy_lab.sim.workers import Done, Item, Workers
from sglang_canopy.errors import CanopyError

REQUESTS_KEPT = 2_000_000
"""Requests whose individual results are kept, over all recent simulations."""


class Evaluator:
    """Evaluates configurations on one trace. A context manager; processes start when needed."""

    def __init__(
        self,
        work: PlanInputs,
        *,
        jobs: int = 1,
        cache: Path | str | None = None,
        seed: int = 0,
    ) -> None:
        self.work, self._seed = work, seed
        self._kv_bytes = work.engine.profile.kv_bytes_per_token
        self.simulated = 0
        self.from_cache = 0
        self._workers = Workers(work, jobs)
        self._results: dict[str, SystemResult] = {}
        """Results of each request in the most recent simulations."""
        profile = work.engine.profile.to_json()
        self.trace_hash = trace_digest(work.trace)
        self._context = digest([self.trace_hash, profile, code_digest()])
        self._cache = Cache(cache, self._context)

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._workers.__exit__(kind, error, trace)
        self._cache.close()

    def __call__(self, configurations: Sequence[Configuration], load: float = 1.0) -> list[Row]:
        """Return one row per configuration, in order."""
        return self.at_loads([(c, load) for c in configurations])

    def at_loads(self, wanted: Sequence[tuple[Configuration, float]]) -> list[Row]:
        """Return one row per (configuration, load), in order."""
        keys = [self._key(c, load) for c, load in wanted]
        missing = list(dict.fromkeys(k for k in keys if self._cache.get(k) is None))
        first = dict(reversed(list(zip(keys, wanted))))
        tasks = [SimulationTask(*first[key], self._seed) for key in missing]
        self.from_cache += len(wanted) - len(tasks)
        if tasks:
            for at, (metrics, result) in self.map(run_in_full, tasks):
                self._cache.put(missing[at], metrics)
                self._results[missing[at]] = result
                while len(self._results) * result.requests > REQUESTS_KEPT:
                    del self._results[next(iter(self._results))]
                self.simulated += 1
        rows: list[Row] = []
        for key, (configuration, _) in zip(keys, wanted):
            kept = self._cache.get(key)
            assert kept is not None, "every missing row was simulated"
            rows.append(row_of(configuration, kept, self.work.prices, self._kv_bytes))
        return rows

    def map(
        self, run: Callable[[PlanInputs, Item], Done], items: Sequence[Item]
    ) -> Iterator[tuple[int, Done]]:
        """Yield ``(index, run(work, item))`` in order of completion, from the worker processes."""
        return self._workers.map(run, items)

    def result(self, configuration: Configuration) -> SystemResult:
        """Return each request's results. Simulates again if they are no longer kept."""
        key = self._key(configuration, 1.0)
        if key not in self._results:
            task = SimulationTask(configuration, seed=self._seed)
            self._results[key] = simulated(self.work, task)[0]
        return self._results[key]

    def conversations(self) -> np.ndarray:
        """Return the number of each request's conversation."""
        return conversations_of(self.work.trace, self.work.served().next_turn)

    def certain_of(self, configuration: Configuration, rows: Sequence[Row]) -> Mapping[str, float]:
        """Return lower bounds that need no simulation."""
        return least_cost(configuration, rows, self.work.prices, self._kv_bytes)

    def is_sold(self, configuration: Configuration) -> bool:
        """Return whether the disk is sold in the size of ``configuration``."""
        try:
            self.certain_of(configuration, [{"makespan_s": 0.0}])
        except CanopyError:
            return False
        return True

    def _key(self, configuration: Configuration, load: float) -> str:
        work = self.work
        config = system_of(configuration, work.engine, work.prices, work.policy_configs)
        what: dict[str, Any] = asdict(config)
        # The group TTL table depends on the budget of all disks together.
        group = configuration.ttl == GROUP and (configuration.disk_gib, configuration.instances)
        return digest([self._context, what, group, load, self._seed])
