"""``canopy simulate system --loads``: the same system at several loads."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from canopy_lab.latency.slo import SLO
from canopy_lab.report.table import text_table
from canopy_lab.sim.system.loads import LoadedSystem, LoadRun
from sglang_canopy.errors import CanopyError


@dataclass(frozen=True, slots=True)
class LoadSweep:
    """Parameters and results of a run over several loads."""

    saturation: float
    """Saturation rate, in ``unit``."""
    unit: str
    loads: dict[float, list[LoadRun]]
    """Share of the saturation -> one run per seed."""
    slo: SLO | None = None

    @property
    def goodput(self) -> float:
        """Highest load up to which every run met the SLO; 0 if the lowest missed it."""
        met = itertools.takewhile(lambda load: self._is_met(self.loads[load]), sorted(self.loads))
        return max(met, default=0.0)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        sweep_json: dict[str, Any] = {
            "saturation": {"rate": self.saturation, "unit": self.unit},
            "loads": [
                {
                    "load": load,
                    "rate": runs[0].rate,
                    "meets_slo": None if self.slo is None else self._is_met(runs),
                    "runs": [run.to_json() for run in runs],
                }
                for load, runs in self.loads.items()
            ],
        }
        if self.slo is not None:
            sweep_json["slo"] = {"text": self.slo.text, "goodput_load": self.goodput}
        return sweep_json

    def text(self) -> str:
        """Return tables, each number the mean over the seeds."""
        parts = [
            f"saturation   {self.saturation:.4g} {self.unit}",
            text_table(
                ["load", self.unit, "TTFT mean s", "P50", "P95", "P99", "max", "sessions/h",
                 "session P99 s", "hits", "saved s: device", "host", "disk",
                 *([self.slo.text] if self.slo else [])],
                [self._load_row(load, runs) for load, runs in self.loads.items()],
            ),
            "TTFT by prompt length, mean / P99 in s",
            text_table(
                ["prompt tokens", *(f"load {load:.0%}" for load in self.loads)],
                self._decile_rows(),
            ),
        ]  # fmt: skip
        if self.slo is not None:
            rate = self.goodput * self.saturation
            parts.append(
                f"goodput      {self.goodput:.1%} of saturation ({rate:.4g} {self.unit}) "
                f"with {self.slo.text}"
            )
        return "\n".join(parts)

    def _is_met(self, runs: Sequence[LoadRun]) -> bool:
        return self.slo is not None and all(self.slo.is_met(run.latency) for run in runs)

    def _load_row(self, load: float, runs: Sequence[LoadRun]) -> list[str]:
        def mean(value_of: Any) -> float:
            return statistics.fmean(value_of(run) for run in runs)

        ttft_s = [
            mean(lambda run, name=name: getattr(run.latency.ttft_s, name))
            for name in ("mean", "p50", "p95", "p99", "max")
        ]
        saved_s = [
            mean(lambda run, tier=tier: run.system.prefill_s_saved_by_tier[tier])
            for tier in ("device", "host", "disk")
        ]
        return [
            f"{load:.0%}",
            f"{runs[0].rate:.4g}",
            *(f"{value:.3f}" for value in ttft_s),
            f"{mean(lambda run: run.latency.sessions_per_hour):.1f}",
            f"{mean(lambda run: run.latency.session_s.p99):.1f}",
            f"{mean(lambda run: run.system.token_hit_ratio):.1%}",
            *(f"{value:.0f}" for value in saved_s),
            *(["met" if self._is_met(runs) else "missed"] if self.slo else []),
        ]

    def _decile_rows(self) -> list[list[str]]:
        rows = []
        runs_by_load = list(self.loads.values())
        for i, decile in enumerate(runs_by_load[0][0].latency.deciles):
            row = [f"{decile.shortest_tokens} to {decile.longest_tokens}"]
            for runs in runs_by_load:
                spreads = [run.latency.deciles[i].ttft_s for run in runs]
                mean = statistics.fmean(spread.mean for spread in spreads)
                row.append(f"{mean:.3f} / {statistics.fmean(spread.p99 for spread in spreads):.3f}")
            rows.append(row)
        return rows


def parse_loads(text: str) -> tuple[float, ...]:
    """Parse ``0.6,0.8,0.95,1.1`` to ascending shares of the saturation. Raises ``CanopyError``."""
    try:
        loads = [float(part) for part in text.split(",")]
    except ValueError:
        loads = []
    if not loads or not all(0 < load <= 10 for load in loads):
        raise CanopyError(
            f"must be shares of the saturation above 0 and up to 10, like 0.6,0.8,0.95,1.1; "
            f"got {text!r}"
        )
    return tuple(sorted(set(loads)))


def run_loads(
    system: LoadedSystem,
    loads: Sequence[float],
    seeds: Sequence[int],
    *,
    unit: str,
    saturation: float | None,
    slo: SLO | None,
) -> LoadSweep:
    """Run every load with every seed. ``saturation=None`` is measured with the first seed."""
    rate = system.saturation(seeds[0]) if saturation is None else saturation
    runs = {load: [system.run_at(load * rate, seed) for seed in seeds] for load in loads}
    return LoadSweep(rate, unit, runs, slo)
