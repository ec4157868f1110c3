"""Recommend the next step in one sentence, for a server's page and status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WORTH_POINTS = 0.5
"""Minimum gain, in points of the prompt tokens, to recommend another policy."""
WORTH_MEMORY_POINTS = 2.0
"""Minimum gain to recommend more memory, which costs money."""


def next_step(
    meter: Mapping[str, Any] | None, policy: str | None, *, ours: bool, auto: bool = False
) -> str:
    """Return the recommendation.

    ``meter``: combined statistics (``total.added_up``); ``policy``: the running policy, if one runs;
    ``ours``: True for a Canopy policy; ``auto``: True under ``--radix-eviction auto``, which switches
    policies itself.
    """
    if policy is None:
        return "No eviction policy runs: the prefix cache is off, or the server has just started."
    if meter is None:
        flag = "--canopy-whatif auto" if ours else "--canopy-observe"
        return (
            f"Nothing is measured beside {policy}: start with {flag} to see what others would find."
        )
    if meter["undecided"]:
        return f"Nothing to decide yet: {meter['undecided']}."
    best, points, error = _best(meter)
    if best is not None and points >= WORTH_POINTS and points > error:
        found = f"{best} would save {points:.1f} ± {error:.1f} points more of your prompt tokens"
        if auto:
            return f"Nothing to do: {found}, and auto lets it rank once that has lasted."
        return f"{found} than {policy}: restart with --radix-eviction {best}"
    return (
        f"Keep {'auto' if auto else policy}: no policy tried would save more.{_memory_gain(meter)}"
    )


def _best(meter: Mapping[str, Any]) -> tuple[str | None, float, float]:
    """Return the best policy at this capacity: name, points gained, two standard errors."""
    here = [a for a in meter["arms"] if a["capacity"] == "now" and not a["running"]]
    if not here:
        return None, 0.0, 0.0
    arm = max(here, key=lambda a: a["hit_ratio"])
    return arm["policy"], *_gain(meter, arm)


def _gain(meter: Mapping[str, Any], arm: Mapping[str, Any]) -> tuple[float, float]:
    return 100 * (arm["hit_ratio"] - meter["hit_ratio"]), 200 * arm["standard_error"]


def _memory_gain(meter: Mapping[str, Any]) -> str:
    """Describe the gain of the best larger tier under the same policy, if worthwhile."""
    same = [a for a in meter["arms"] if a["policy"] == meter["running"] and not a["running"]]
    if not same:
        return ""
    arm = max(same, key=lambda a: a["hit_ratio"])
    points, error = _gain(meter, arm)
    if points < WORTH_MEMORY_POINTS or points <= error:
        return ""
    return f" More memory would: {arm['capacity']} saves {points:.1f} ± {error:.1f} points more."
