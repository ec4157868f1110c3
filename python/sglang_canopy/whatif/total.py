"""Combine the meters of several replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SHARES = (
    *("hit_ratio", "sampled_hit_ratio", "standard_error", "sampling_error"),
    *("saved_share", "saved_share_error"),
)


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
        "saved_share": mean([m["saved_share"] for m in meters]),
        "depth_scale_tokens": _depth_scale(meters),
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
        "sums": {key: sum(m["sums"][key] for m in meters) for key in first["sums"]},
        **{
            key: {name: sum(m[key].get(name, 0) for m in meters) for name in first[key]}
            for key in ("shadow_tokens", "shadow_squares")
        },
        "undecided": min((m["undecided"] for m in meters), key=lambda why: why is not None),
    }


def _depth_scale(meters: Sequence[Mapping[str, Any]]) -> int | None:
    """Return a depth scale, or ``None`` while a meter with requests has none: then shares of seconds
    and of tokens would be mixed."""
    used = [m["depth_scale_tokens"] for m in meters if m["sampled_requests"]]
    return None if None in used else next(iter(used), None)


def in_words(meter: Mapping[str, Any]) -> str:
    """Describe the running policy's hits and those estimated for each other arm."""
    if meter["undecided"]:
        return f"{meter['running']} runs; {meter['undecided']}"
    parts = [f"{meter['running']} hits {100 * meter['hit_ratio']:.1f} %"]
    for arm in meter["arms"]:
        if not arm["running"]:
            where = "" if arm["capacity"] == "now" else f" with {arm['capacity']}"
            parts.append(f"{arm['policy']}{where} would hit {percent(arm)}{_fewer(meter, arm)}")
    return ", ".join(parts)


def seconds_change(meter: Mapping[str, Any], arm: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return an arm's change of prefill seconds against the running policy, and two standard errors,
    in percent; ``None`` while prefill times are not measured."""
    left = 1.0 - meter["saved_share"]
    if meter["depth_scale_tokens"] is None or left <= 0.0:
        return None
    more = meter["saved_share"] - arm["saved_share"]
    return 100 * more / left, 200 * arm["saved_share_error"] / left


def _fewer(meter: Mapping[str, Any], arm: Mapping[str, Any]) -> str:
    change = seconds_change(meter, arm)
    return "" if change is None else f" ({change[0]:+.1f} ± {change[1]:.1f} % of prefill seconds)"


def percent(arm: Mapping[str, Any]) -> str:
    """Format an arm's hit ratio with two standard errors."""
    return f"{100 * arm['hit_ratio']:.1f} ± {200 * arm['standard_error']:.1f} %"
