"""Confidences of plans, and the share of fresh logs that met their limits.

``benchmark/plan/confidence.py`` measures both; a test holds these rows to its result file.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Calibration:
    """Plans for limits on one metric, on the populations that judge."""

    metric: str
    plans: int
    stated: float
    """Mean confidence."""
    held: float
    """Share of fresh logs that met the limit."""
    sure_held: float
    """The same of plans that stated 90 % or more."""


CALIBRATIONS = (
    Calibration("p99_ttft", plans=1339, stated=0.74, held=0.75, sure_held=0.84),
    Calibration("p90_ttft", plans=1489, stated=0.76, held=0.84, sure_held=0.97),
    Calibration("mean_ttft", plans=1526, stated=0.80, held=0.86, sure_held=0.94),
)
"""Rows by metric."""
NOT_COVERED = "a change of the traffic or its rate, other populations, days that differ, errors of the simulator"


def calibration_text() -> list[str]:
    """Describe the error of the confidence."""
    each = "; ".join(
        f"{row.metric}: {100 * row.stated:.0f} %, {100 * row.held:.0f} % ({100 * row.sure_held:.0f} %)"
        for row in CALIBRATIONS
    )
    return [
        "    stated and held on fresh logs of simulated populations that did not set it (held of those "
        f"that stated 90 % or more): {each}",
        f"    not covered: {NOT_COVERED}",
    ]
