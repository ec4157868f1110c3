"""Run one system at several rates, and search for its saturation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from canopy_lab.latency.latency_report import LatencyReport, latency_report
from canopy_lab.latency.saturation import SESSION_TOLERANCE, TOLERANCE, saturation
from canopy_lab.sim.system.arrivals import Arrivals, ClosedLoop, OpenLoop, TurnsWait
from canopy_lab.sim.system.config import SystemConfig
from canopy_lab.sim.system.engine_profile import EngineProfile
from canopy_lab.sim.system.result import SystemResult
from canopy_lab.sim.system.run import simulate_system
from canopy_lab.sim.system.workload import Workload
from canopy_lab.trace.sessions import turn_links
from sglang_canopy.errors import CanopyError

LOOPS = ("open", "turns-wait", "closed")


@dataclass(frozen=True, slots=True)
class LoadRun:
    rate: float
    """Requests per second, or sessions per hour in a closed loop."""
    seed: int
    latency: LatencyReport
    system: SystemResult

    def to_json(self) -> dict[str, Any]:
        return {
            "rate": self.rate,
            "seed": self.seed,
            "latency": asdict(self.latency),
            "system": self.system.to_json(),
        }


class LoadedSystem:
    """Runs of one workload at any rate.

    ``open`` and ``turns-wait`` scale the trace's times, which preserves bursts and pauses. In a
    ``closed`` loop the rate is that of session starts; think times are unchanged. ``rate`` is in
    requests per second, or sessions per hour in a closed loop.
    """

    def __init__(
        self,
        workload: Workload,
        config: SystemConfig,
        profile: EngineProfile,
        *,
        loop: str = "open",
        think_cap_s: float | None = 120.0,
        logged_times: bool = False,
    ) -> None:
        if loop not in LOOPS:
            raise CanopyError(f"loop must be one of {', '.join(LOOPS)}, got {loop!r}")
        self.config = config
        self._profile = profile
        self._workload = workload
        self._loop = loop
        self._think_cap_s = think_cap_s
        self._logged_times = logged_times
        self._session_starts = turn_links(workload.trace).session_start
        self._workload_by_seed = {workload.seed: workload}
        span_s = max(workload.times_s[-1] - workload.times_s[0], 1e-9)
        self.trace_rate = len(workload) / span_s
        """The trace's own rate."""
        if loop == "closed":
            self.trace_rate = len(set(self._session_starts)) * 3600 / span_s

    def run_at(self, rate: float | None = None, seed: int = 0) -> LoadRun:
        """Run at ``rate``, or at the trace's times. ``seed`` draws request times and session starts."""
        workload = self._seeded_workload(seed)
        result = simulate_system(
            workload, self.config, self._profile, arrivals=self._arrivals(workload, rate, seed)
        )
        latency = latency_report(
            result.due_s,
            result.ttft_s,
            result.due_s + result.e2e_s,
            result.prompt_tokens,
            self._session_starts,
        )
        return LoadRun(self.trace_rate if rate is None else rate, seed, latency, result)

    def saturation(self, seed: int = 0) -> float:
        """Return the highest rate without a growing queue (``latency/saturation.py``); in a closed
        loop, without a growing lag of session ends."""

        def growth(rate: float) -> float:
            latency = self.run_at(rate, seed).latency
            return latency.lag if self._loop == "closed" else latency.growth

        tolerance = SESSION_TOLERANCE if self._loop == "closed" else TOLERANCE
        return saturation(growth, self.trace_rate, tolerance=tolerance)

    def _arrivals(self, workload: Workload, rate: float | None, seed: int) -> Arrivals:
        if self._loop == "closed":
            return ClosedLoop(
                workload, sessions_per_hour=rate, think_cap_s=self._think_cap_s, seed=seed
            )
        stretch = 1.0 if rate is None else self.trace_rate / rate
        return (TurnsWait if self._loop == "turns-wait" else OpenLoop)(workload, stretch)

    def _seeded_workload(self, seed: int) -> Workload:
        if self._logged_times or not self._workload.times_were_spread:
            return self._workload
        workload = self._workload_by_seed.get(seed)
        if workload is None:
            workload = self._workload_by_seed[seed] = Workload(
                self._workload.trace, self._workload.outputs, seed=seed
            )
        return workload
