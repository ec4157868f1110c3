"""Figures of docs/guide/start-here.md from ``scripts/journey.py``."""

from __future__ import annotations

from result_tables import load

JOURNEY = "benchmark/advise/results/journey.json"


def minutes() -> str:
    """Minutes of each step from the log to the verdict, and the trial's verdict."""
    found = load(JOURNEY)
    took = {step: seconds / 60 for step, seconds in found["seconds"].items()}
    (answer,) = (line for line in found["trial"] if " points of the p" in line)
    steps = ("advise", "start", "meter", "trial")
    told = ", ".join(f"{step} {took[step]:.1f}" for step in steps)
    return (
        f"{sum(took[step] for step in steps):.0f} minutes ({told}; slices of {found['slice_s']:g} s): "
        f"{answer.partition(' It ranks now')[0]}"
    )


PARTS = {"minutes": minutes}
