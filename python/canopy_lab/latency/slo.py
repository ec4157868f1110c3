"""Latency targets such as ``p99_ttft<2s``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from canopy_lab.latency.latency_report import LatencyReport
from sglang_canopy.errors import CanopyError

STATISTICS = ("mean", "p50", "p95", "p99", "max")
METRIC_FIELDS = {"ttft": "ttft_s", "session": "session_s"}
_UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
_TARGET = re.compile(r"([a-z0-9]+)_([a-z]+)\s*<=?\s*([0-9]*\.?[0-9]+)\s*([a-z]*)")


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """Limit on one statistic."""

    statistic: str
    metric: str
    limit_s: float

    def is_met(self, report: LatencyReport) -> bool:
        """Return whether a run met the target."""
        spread = getattr(report, METRIC_FIELDS[self.metric])
        return bool(getattr(spread, self.statistic) < self.limit_s)


@dataclass(frozen=True, slots=True)
class SLO:
    """Targets that must all be met."""

    text: str
    targets: tuple[LatencyTarget, ...]

    def is_met(self, report: LatencyReport) -> bool:
        """Return whether a run met every target."""
        return all(target.is_met(report) for target in self.targets)


def parse_slo(text: str) -> SLO:
    """Parse ``p99_ttft<2s``, or several targets separated by commas.

    A target is a statistic (mean, p50, p95, p99, max) of ``ttft`` or ``session``, ``<``, and a time
    with its unit (ms, s, min, h). Raises ``CanopyError``.
    """
    targets = []
    for term in text.split(","):
        match = _TARGET.fullmatch(term.strip().lower())
        if match is None:
            raise CanopyError(
                f"an SLO is written like p99_ttft<2s or p95_ttft<500ms,p99_session<10min; "
                f"cannot read {term.strip()!r}"
            )
        statistic, metric, number, unit = match.groups()
        for field, value, allowed in (
            ("statistic", statistic, STATISTICS),
            ("metric", metric, tuple(METRIC_FIELDS)),
            ("unit", unit, tuple(_UNITS)),
        ):
            if value not in allowed:
                raise CanopyError(
                    f"SLO {term.strip()!r}: the {field} must be one of {', '.join(allowed)}, "
                    f"got {value!r}"
                )
        limit_s = float(number) * _UNITS[unit]
        if not limit_s > 0:
            raise CanopyError(f"SLO {term.strip()!r}: the time must be above 0")
        targets.append(LatencyTarget(statistic, metric, limit_s))
    return SLO(text, tuple(targets))
