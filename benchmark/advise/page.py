"""What docs/guide/start-here.md says of its own journey: ``scripts/journey.py``."""

from __future__ import annotations

from typing import Any

from result_tables import load

JOURNEY, AGAIN = (f"benchmark/advise/results/journey{which}.json" for which in ("", "-again"))


def minutes() -> str:
    """From the log to the answer: minutes of each step, and what the trial said; of another run, the
    latter alone."""
    found = load(JOURNEY)
    took = {step: seconds / 60 for step, seconds in found["seconds"].items()}
    steps = ("advise", "start", "meter", "trial")
    told = ", ".join(f"{step} {took[step]:.1f}" for step in steps)
    return (
        f"{sum(took[step] for step in steps):.0f} minutes ({told}; slices of {found['slice_s']:g} s): "
        f"{_answer(found)} Another run: {_answer(load(AGAIN))}"
    )


def _answer(found: dict[str, Any]) -> str:
    (answer,) = (line for line in found["trial"] if " points of the prompt tokens (" in line)
    return answer.partition(" It ranks now")[0]


PARTS = {"minutes": minutes}
