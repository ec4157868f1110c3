"""Confidences of plans, and the share of fresh logs that met their limits.

``benchmark/plan/confidence.py`` measures both on logs of one simulated population; a test compares
these rows with its result file.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Calibration:
    """Plans from logs of one size."""

    conversations: int
    plans: int
    stated: float
    """Mean confidence."""
    held: float
    """Share of fresh logs that met the limits, averaged over plans."""
    worst: float
    """The same share for the worst plan."""


CALIBRATIONS = (
    Calibration(120, plans=8, stated=0.78, held=0.59, worst=0.25),
    Calibration(500, plans=4, stated=0.85, held=0.96, worst=0.83),
)
"""Rows by conversations in a log, ascending."""
NOT_COVERED = "days, a change of the traffic or its rate, errors of the simulator"


def calibration_of(conversations: int) -> Calibration:
    """Return the row of the largest log that is not larger, else the first row."""
    fitting = [one for one in CALIBRATIONS if one.conversations <= conversations]
    return fitting[-1] if fitting else CALIBRATIONS[0]


def calibration_text(conversations: int) -> list[str]:
    """Describe the error of a confidence from a log of this size."""
    row = calibration_of(conversations)
    lines = [
        f"    how far to trust that: {row.plans} plans from simulated logs of {row.conversations} "
        f"conversations stated {100 * row.stated:.0f} %, and {100 * row.held:.0f} % of fresh logs met the "
        f"limits (worst plan {100 * row.worst:.0f} %)",
        f"    not covered: {NOT_COVERED}",
    ]
    if conversations < CALIBRATIONS[-1].conversations:
        lines.append(
            f"    this log has {conversations} conversations, so the confidence is too high; "
            f"plan from {CALIBRATIONS[-1].conversations} or more"
        )
    return lines
