"""The recommendation from measured gains: a policy, or to keep LRU."""

from __future__ import annotations

from dataclasses import dataclass

WORTH_POINTS = 0.5
"""Smallest gain, in points of the token hit ratio, that justifies a change of policy."""
SIMPLER_POINTS = 0.5
"""Margin below which a simpler policy wins over the best one."""
REPEATS_POINTS = 1.0
"""Smallest share of repeated prompt tokens, in percent, for any advice."""


@dataclass(frozen=True, slots=True)
class Gain:
    """An arm against the baseline, in points (hundredths) of the prompt tokens."""

    label: str
    flag: str
    hit_ratio: float
    points: float
    low: float
    high: float
    """95 % interval over conversations."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The recommendation."""

    flag: str
    """Value for ``--radix-eviction``; ``lru`` keeps SGLang's own."""
    gain: Gain | None
    """``None`` if LRU is kept."""
    sentence: str


def decide(
    baseline: float,
    repeats: float,
    bound: float,
    candidates: list[Gain],
    *,
    capacity: str,
    memory: str = "",
    few_requests: int = 0,
) -> Recommendation:
    """Return the recommendation.

    ``baseline``, ``repeats`` and ``bound``: hit ratios (0 to 1) of the baseline, an endless cache and
    hindsight. ``candidates``: the simplest first. ``capacity``: text for the sentence. ``memory``: a
    sentence about a larger cache, added if LRU is kept. ``few_requests``: requests of a log that is too
    short, else 0.
    """
    lru_text = f"{100 * baseline:.1f} %"
    if few_requests:
        return _keep(
            f"Keep LRU for now: the log has only {few_requests} requests, too few to tell; give a longer one."
        )
    if 100 * repeats < REPEATS_POINTS:
        return _keep(
            f"Keep LRU: only {100 * repeats:.1f} % of the prompt tokens repeat, so no policy and no "
            "cache of any size has something to win."
        )
    gains = [g for g in candidates if g.low > 0 and g.points >= WORTH_POINTS]
    if not gains:
        return _keep(f"Keep LRU: {_cause(baseline, repeats, bound, candidates, capacity)}{memory}")
    largest = max(gains, key=lambda g: g.points)
    advised = next(g for g in gains if g.points > largest.points - SIMPLER_POINTS)
    return Recommendation(
        advised.flag,
        advised,
        f"Use {_policy_text(advised)}: at {capacity} it hits {100 * advised.hit_ratio:.1f} % of the prompt "
        f"tokens instead of the {lru_text} of SGLang's LRU, {advised.points:+.1f} points (95 % interval "
        f"{advised.low:.1f} to {advised.high:.1f}).",
    )


def _policy_text(gain: Gain) -> str:
    """Return the value for ``--radix-eviction`` and the policy that ranks under it."""
    return gain.flag if gain.flag == gain.label else f"{gain.flag} ({gain.label} ranks)"


def _cause(
    baseline: float, repeats: float, bound: float, candidates: list[Gain], capacity: str
) -> str:
    lru_text, missed_points = f"{100 * baseline:.1f} %", 100 * (repeats - baseline)
    if missed_points < REPEATS_POINTS:
        return (
            f"at {capacity} it already hits {lru_text} of the prompt tokens, of the {100 * repeats:.1f} % "
            "that an endless cache would."
        )
    if 100 * (bound - baseline) < REPEATS_POINTS:
        return (
            f"at {capacity} it hits {lru_text} of the prompt tokens, and even a policy that knew the "
            f"future would hit only {100 * bound:.1f} %."
        )
    best_gain = max(candidates, key=lambda g: g.points)
    return (
        f"at {capacity} it hits {lru_text} of the prompt tokens, and the best policy tried, {best_gain.label}, "
        f"changes that by {best_gain.points:+.1f} points (95 % interval {best_gain.low:.1f} to "
        f"{best_gain.high:.1f}), too little to act on."
    )


def _keep(sentence: str) -> Recommendation:
    return Recommendation("lru", None, sentence)


@dataclass(frozen=True, slots=True)
class FirstStart:
    """The first start of a server after advice: its flags, and the next step."""

    flags: tuple[str, ...]
    next_step: str


def first_start(decision: Recommendation) -> FirstStart:
    """Return a start that changes little.

    If LRU is advised, SGLang's own cache runs and Canopy observes. If another policy is advised,
    Canopy's tree runs LRU, and the meter measures the others.
    """
    if decision.gain is None:
        return FirstStart(
            ("--canopy-observe",),
            "see /canopy/ui on the server: its first line reports a possible gain.",
        )
    flags = ("--radix-eviction", "canopy-lru", "--canopy-whatif", "canopy-lru,wa,floor=off")
    if decision.flag == "canopy-lru":
        return FirstStart(
            flags, "canopy-lru ranks; /canopy/ui shows what other policies would hit."
        )
    return FirstStart(
        flags,
        f"see /canopy/ui: if the server's meter agrees, restart with --radix-eviction {decision.flag}. "
        "Back: drop the flags.",
    )
