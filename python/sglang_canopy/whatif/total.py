"""The meters of several replicas together: their sums, in words, and the next step to recommend."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

MIN_GAIN_POINTS = 0.5
"""Minimum gain, in points of the prompt tokens, to recommend another policy."""
MIN_MEMORY_GAIN_POINTS = 2.0
"""Minimum gain to recommend more memory, which costs money."""
_MEAN_KEYS = ("hit_ratio", "sampled_hit_ratio", "standard_error", "sampling_error")


def combine_meters(meters: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Combine the ``stats`` of several meters, weighted by sampled requests; ``None`` if empty."""
    if not meters:
        return None
    weights = [meter["sampled_requests"] for meter in meters]
    total_requests = sum(weights)

    def mean(values: Sequence[float]) -> float:
        if not total_requests:
            return 0.0
        return round(
            sum(value * weight for value, weight in zip(values, weights)) / total_requests, 5
        )

    first_meter = meters[0]
    arms = []
    for arm in first_meter["arms"]:
        same_arms = [_find_arm(meter, arm) for meter in meters]
        shares = {key: mean([same_arm[key] for same_arm in same_arms]) for key in _MEAN_KEYS}
        arms.append({**arm, **shares, "tokens": sum(same_arm["tokens"] for same_arm in same_arms)})
    return {
        "running": first_meter["running"],
        "hit_ratio": mean([meter["hit_ratio"] for meter in meters]),
        "arms": arms,
        "one_block_in": max(meter["one_block_in"] for meter in meters),
        "too_small": sorted({name for meter in meters for name in meter["too_small"]}),
        "sampled_requests": total_requests,
        "spent_s": round(sum(meter["spent_s"] for meter in meters), 4),
        "undecided": min(
            (meter["undecided"] for meter in meters), key=lambda reason: reason is not None
        ),
    }


def _find_arm(meter: Mapping[str, Any], arm: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arm of ``meter`` like ``arm``, or ``arm`` itself."""
    name = arm["policy"], arm["capacity"]
    arms = (other for other in meter["arms"] if (other["policy"], other["capacity"]) == name)
    return next(arms, arm)


def describe_total(meter: Mapping[str, Any]) -> str:
    """Describe the running policy's hits and those estimated for each other arm."""
    if meter["undecided"]:
        return f"{meter['running']} runs; {meter['undecided']}"
    parts = [f"{meter['running']} hits {100 * meter['hit_ratio']:.1f} %"]
    for arm in meter["arms"]:
        if not arm["running"]:
            capacity_text = "" if arm["capacity"] == "now" else f" with {arm['capacity']}"
            parts.append(f"{arm['policy']}{capacity_text} would hit {hit_percent(arm)}")
    return ", ".join(parts)


def hit_percent(arm: Mapping[str, Any]) -> str:
    """Format an arm's hit ratio with two standard errors."""
    return f"{100 * arm['hit_ratio']:.1f} ± {200 * arm['standard_error']:.1f} %"


def next_step(
    meter: Mapping[str, Any] | None,
    policy: str | None,
    *,
    is_canopy: bool,
    auto_policies: Collection[str] | None = None,
) -> str:
    """Return the recommendation. ``meter``: combined statistics (``total.combine_meters``); ``policy``:
    the running policy, if one runs; ``is_canopy``: True for a Canopy policy; ``auto_policies``: under
    ``--radix-eviction auto``, the policies between which it switches itself."""
    if policy is None:
        return "No eviction policy runs: the prefix cache is off, or the server has just started."
    if meter is None:
        flag = "--canopy-whatif auto" if is_canopy else "--canopy-observe"
        return (
            f"Nothing is measured beside {policy}: start with {flag} to see what others would find."
        )
    if meter["undecided"]:
        return f"Nothing to decide yet: {meter['undecided']}."
    policy_name, gain_points, error_points = _best_policy(meter)
    if policy_name is not None and gain_points >= MIN_GAIN_POINTS and gain_points > error_points:
        gain = f"{policy_name} would save {gain_points:.1f} ± {error_points:.1f} points more of your prompt tokens"
        if auto_policies is not None and policy_name in auto_policies:
            return f"Nothing to do: {gain}, and auto lets it rank once that has lasted."
        return f"{gain} than {policy}: restart with --radix-eviction {policy_name}"
    return f"Keep {policy if auto_policies is None else 'auto'}: no policy tried would save more.{_memory_gain(meter)}"


def _best_policy(meter: Mapping[str, Any]) -> tuple[str | None, float, float]:
    """Return the best policy at this capacity: name, points gained, two standard errors."""
    arms_now = [arm for arm in meter["arms"] if arm["capacity"] == "now" and not arm["running"]]
    if not arms_now:
        return None, 0.0, 0.0
    arm = max(arms_now, key=lambda arm: arm["hit_ratio"])
    return arm["policy"], *_gain_points(meter, arm)


def _gain_points(meter: Mapping[str, Any], arm: Mapping[str, Any]) -> tuple[float, float]:
    return 100 * (arm["hit_ratio"] - meter["hit_ratio"]), 200 * arm["standard_error"]


def _memory_gain(meter: Mapping[str, Any]) -> str:
    """Describe the gain of the best larger tier under the same policy, if worthwhile."""
    policy = meter["running"]
    same_arms = [arm for arm in meter["arms"] if arm["policy"] == policy and not arm["running"]]
    if not same_arms:
        return ""
    arm = max(same_arms, key=lambda arm: arm["hit_ratio"])
    gain_points, error_points = _gain_points(meter, arm)
    if gain_points < MIN_MEMORY_GAIN_POINTS or gain_points <= error_points:
        return ""
    return f" More memory would: {arm['capacity']} saves {gain_points:.1f} ± {error_points:.1f} points more."
