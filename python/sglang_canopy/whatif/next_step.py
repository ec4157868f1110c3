"""What to do next with a server's policies, in one sentence: for its page and ``canopy top``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WORTH_POINTS = 0.5
"""Least gain, in points of the prompt tokens, for which a policy is worth a trial."""
WORTH_MEMORY_POINTS = 2.0
"""The same for more memory, which costs money."""


def next_step(
    meter: Mapping[str, Any] | None, policy: str, *, ours: bool, auto: bool = False
) -> str:
    """The sentence. ``meter``: what all meters say together (``total.added_up``); ``policy``: the
    one that runs; ``ours``: whether it is Canopy's; ``auto``: whether the server was started with
    ``--radix-eviction auto``, which exchanges policies by itself."""
    if meter is None:
        flag = "--canopy-whatif auto" if ours else "--canopy-observe"
        return (
            f"Nothing is measured beside {policy}: start with {flag} to see what others would find."
        )
    if meter["undecided"]:
        return f"Nothing to decide yet: {meter['undecided']}."
    best, points, error = _best(meter)
    if best is not None and points >= WORTH_POINTS and points > error:
        found = f"{best} would find {points:.1f} ± {error:.1f} points more of your prompt tokens"
        if auto:
            return f"Nothing to do: {found}, and auto lets it rank once that has lasted."
        if not ours:
            return (
                f"{found} than {policy}: restart with --radix-eviction canopy-lru --canopy-whatif "
                f"auto,floor=off, then run: canopy trial --policy {best}"
            )
        return f"{found} than {policy}: run canopy trial --policy {best}"
    return f"Keep {'auto' if auto else policy}: no policy tried would find more.{_memory(meter)}"


def _best(meter: Mapping[str, Any]) -> tuple[str | None, float, float]:
    """The other policy that would hit most now: its name, points more, and two standard errors."""
    here = [a for a in meter["arms"] if a["capacity"] == "now" and not a["running"]]
    if not here:
        return None, 0.0, 0.0
    arm = max(here, key=lambda a: a["hit_ratio"])
    points = 100 * (arm["hit_ratio"] - meter["hit_ratio"])
    return arm["policy"], points, 200 * arm["standard_error"]


def _memory(meter: Mapping[str, Any]) -> str:
    """What a larger tier would find under the same policy, where that is much."""
    same = [a for a in meter["arms"] if a["policy"] == meter["running"] and not a["running"]]
    if not same:
        return ""
    arm = max(same, key=lambda a: a["hit_ratio"])
    points, error = 100 * (arm["hit_ratio"] - meter["hit_ratio"]), 200 * arm["standard_error"]
    if points < WORTH_MEMORY_POINTS or points <= error:
        return ""
    return f" More memory would: {arm['capacity']} finds {points:.1f} ± {error:.1f} points more."
