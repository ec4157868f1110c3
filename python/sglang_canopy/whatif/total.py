"""The meters of several replicas together: their sums, in words, and the next step to recommend."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

WORTH_POINTS = 0.5
"""Minimum gain, in points of the prompt tokens, to recommend another policy."""
WORTH_MEMORY_POINTS = 2.0
"""Minimum gain to recommend more memory, which costs money."""
_SHARES = ("hit_ratio", "sampled_hit_ratio", "standard_error", "sampling_error")


def added_up(meters: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Combine the ``stats`` of several meters, weighted by sampled requests; ``None`` if empty."""
    if not meters:
        return None
    weights = [meter["sampled_requests"] for meter in meters]
    whole = sum(weights)

    def mean(values: Sequence[float]) -> float:
        if not whole:
            return 0.0
        return round(sum(v * w for v, w in zip(values, weights)) / whole, 5)

    first = meters[0]
    arms = []
    for arm in first["arms"]:
        name = (arm["policy"], arm["capacity"])
        same_arms = [
            next((a for a in m["arms"] if (a["policy"], a["capacity"]) == name), arm)
            for m in meters
        ]
        shares = {key: mean([a[key] for a in same_arms]) for key in _SHARES}
        arms.append({**arm, **shares, "tokens": sum(a["tokens"] for a in same_arms)})
    return {
        "running": first["running"],
        "hit_ratio": mean([m["hit_ratio"] for m in meters]),
        "arms": arms,
        "one_block_in": max(m["one_block_in"] for m in meters),
        "too_small": sorted({name for m in meters for name in m["too_small"]}),
        "sampled_requests": whole,
        "spent_s": round(sum(m["spent_s"] for m in meters), 4),
        "undecided": min((m["undecided"] for m in meters), key=lambda why: why is not None),
    }


def describe_total(meter: Mapping[str, Any]) -> str:
    """Describe the running policy's hits and those estimated for each other arm."""
    if meter["undecided"]:
        return f"{meter['running']} runs; {meter['undecided']}"
    parts = [f"{meter['running']} hits {100 * meter['hit_ratio']:.1f} %"]
    for arm in meter["arms"]:
        if not arm["running"]:
            where = "" if arm["capacity"] == "now" else f" with {arm['capacity']}"
            parts.append(f"{arm['policy']}{where} would hit {hit_percent(arm)}")
    return ", ".join(parts)


def hit_percent(arm: Mapping[str, Any]) -> str:
    """Format an arm's hit ratio with two standard errors."""
    return f"{100 * arm['hit_ratio']:.1f} ± {200 * arm['standard_error']:.1f} %"


def next_step(
    meter: Mapping[str, Any] | None,
    policy: str | None,
    *,
    is_canopy: bool,
    auto: Collection[str] | None = None,
) -> str:
    """Return the recommendation.

    ``meter``: combined statistics (``total.added_up``); ``policy``: the running policy, if one runs;
    ``is_canopy``: True for a Canopy policy; ``auto``: under ``--radix-eviction auto``, the policies between
    which it switches itself.
    """
    if policy is None:
        return "No eviction policy runs: the prefix cache is off, or the server has just started."
    if meter is None:
        flag = "--canopy-whatif auto" if is_canopy else "--canopy-observe"
        return (
            f"Nothing is measured beside {policy}: start with {flag} to see what others would find."
        )
    if meter["undecided"]:
        return f"Nothing to decide yet: {meter['undecided']}."
    best, points, error = _best(meter)
    if best is not None and points >= WORTH_POINTS and points > error:
        gain = f"{best} would save {points:.1f} ± {error:.1f} points more of your prompt tokens"
        if auto is not None and best in auto:
            return f"Nothing to do: {gain}, and auto lets it rank once that has lasted."
        return f"{gain} than {policy}: restart with --radix-eviction {best}"
    return f"Keep {policy if auto is None else 'auto'}: no policy tried would save more.{_memory_gain(meter)}"


def _best(meter: Mapping[str, Any]) -> tuple[str | None, float, float]:
    """Return the best policy at this capacity: name, points gained, two standard errors."""
    arms_now = [a for a in meter["arms"] if a["capacity"] == "now" and not a["running"]]
    if not arms_now:
        return None, 0.0, 0.0
    arm = max(arms_now, key=lambda a: a["hit_ratio"])
    return arm["policy"], *_gain(meter, arm)


def _gain(meter: Mapping[str, Any], arm: Mapping[str, Any]) -> tuple[float, float]:
    return 100 * (arm["hit_ratio"] - meter["hit_ratio"]), 200 * arm["standard_error"]


def _memory_gain(meter: Mapping[str, Any]) -> str:
    """Describe the gain of the best larger tier under the same policy, if worthwhile."""
    same_arms = [a for a in meter["arms"] if a["policy"] == meter["running"] and not a["running"]]
    if not same_arms:
        return ""
    arm = max(same_arms, key=lambda a: a["hit_ratio"])
    points, error = _gain(meter, arm)
    if points < WORTH_MEMORY_POINTS or points <= error:
        return ""
    return f" More memory would: {arm['capacity']} saves {points:.1f} ± {error:.1f} points more."
