"""Combine the meters of several replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
        same = [
            next((a for a in m["arms"] if (a["policy"], a["capacity"]) == name), arm)
            for m in meters
        ]
        shares = {key: mean([a[key] for a in same]) for key in _SHARES}
        arms.append({**arm, **shares, "tokens": sum(a["tokens"] for a in same)})
    return {
        "running": first["running"],
        "hit_ratio": mean([m["hit_ratio"] for m in meters]),
        "arms": arms,
        "one_block_in": max(m["one_block_in"] for m in meters),
        "too_small": sorted({name for m in meters for name in m["too_small"]}),
        "sampled_requests": whole,
        "requests": {
            **{
                key: sum(m["requests"][key] for m in meters)
                for key in ("counted", "counted_since_exchange")
            },
            "needed": first["requests"]["needed"],
            "uncounted": {
                why: sum(m["requests"]["uncounted"][why] for m in meters)
                for why in first["requests"]["uncounted"]
            },
        },
        "spent_s": round(sum(m["spent_s"] for m in meters), 4),
        "undecided": min((m["undecided"] for m in meters), key=lambda why: why is not None),
    }


def in_words(meter: Mapping[str, Any]) -> str:
    """Describe the running policy's hits and those estimated for each other arm."""
    if meter["undecided"]:
        return f"{meter['running']} runs; {meter['undecided']}"
    parts = [f"{meter['running']} hits {100 * meter['hit_ratio']:.1f} %"]
    for arm in meter["arms"]:
        if not arm["running"]:
            where = "" if arm["capacity"] == "now" else f" with {arm['capacity']}"
            parts.append(f"{arm['policy']}{where} would hit {percent(arm)}")
    return ", ".join(parts)


def percent(arm: Mapping[str, Any]) -> str:
    """Format an arm's hit ratio with two standard errors."""
    return f"{100 * arm['hit_ratio']:.1f} ± {200 * arm['standard_error']:.1f} %"
