"""Evaluate configurations by simulation, each only once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

from canopy_lab.plan.objective import PlanRow
from canopy_lab.plan.space import GROUP, Configuration
from canopy_lab.plan.system import cost_bounds, row_of, system_of
from canopy_lab.plan.worker import PlanInputs, SimulationTask, run_task
from canopy_lab.sim.workers import Item, Result, Workers
from sglang_canopy.errors import CanopyError


class Evaluator:
    """Evaluates configurations on one trace. A context manager; processes start when needed."""

    def __init__(self, inputs: PlanInputs, *, jobs: int = 1) -> None:
        self.inputs = inputs
        self._kv_bytes = inputs.engine.profile.kv_bytes_per_token
        self._workers = Workers(inputs, jobs)
        self._rows: dict[str, dict[str, Any]] = {}

    @property
    def simulation_count(self) -> int:
        return len(self._rows)

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._workers.__exit__(error_type, error, traceback)

    def __call__(self, configurations: Sequence[Configuration], load: float = 1.0) -> list[PlanRow]:
        """Return one row per configuration, in order."""
        return self.rows_at([(c, load) for c in configurations])

    def rows_at(self, pairs: Sequence[tuple[Configuration, float]]) -> list[PlanRow]:
        """Return one row per (configuration, load), in order."""
        keys = [self._key(c, load) for c, load in pairs]
        missing = list(dict.fromkeys(k for k in keys if k not in self._rows))
        pair_by_key = dict(reversed(list(zip(keys, pairs))))
        tasks = [SimulationTask(*pair_by_key[key]) for key in missing]
        for index, metrics in self.map(run_task, tasks):
            self._rows[missing[index]] = metrics
        return [
            row_of(configuration, self._rows[key], self.inputs.prices, self._kv_bytes)
            for key, (configuration, _) in zip(keys, pairs)
        ]

    def map(
        self, run: Callable[[PlanInputs, Item], Result], items: Sequence[Item]
    ) -> Iterator[tuple[int, Result]]:
        """Yield ``(index, run(work, item))`` in order of completion, from the worker processes."""
        return self._workers.map(run, items)

    def bounds_of(
        self, configuration: Configuration, rows: Sequence[PlanRow]
    ) -> Mapping[str, float]:
        """Return lower bounds that need no simulation."""
        return cost_bounds(configuration, rows, self.inputs.prices, self._kv_bytes)

    def is_sold(self, configuration: Configuration) -> bool:
        """Return whether the disk is sold in the size of ``configuration``."""
        try:
            cost_bounds(configuration, [], self.inputs.prices, self._kv_bytes)
        except CanopyError:
            return False
        return True

    def _key(self, configuration: Configuration, load: float) -> str:
        """Return a key that configurations with one simulation share."""
        inputs = self.inputs
        config = system_of(configuration, inputs.engine, inputs.prices, inputs.policy_configs)
        settings: dict[str, Any] = asdict(config)
        # The group TTL table depends on the budget of all disks together.
        group = configuration.ttl == GROUP and (configuration.disk_gib, configuration.instances)
        return json.dumps([settings, group, load], sort_keys=True, default=str)
