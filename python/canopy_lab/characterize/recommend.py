"""The recommendation: policy, categories, capacity, and how certain the gain is.

Policies are run in the simulator, the same objects the server uses. The gain over LRU is
bootstrapped over conversations (over windows of time where the trace names none), which says how
much it depends on who happened to be there; the placebo, labels shuffled among the requests,
says how much of it the labels brought.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from canopy_lab.characterize.capacity import blocks_for
from canopy_lab.characterize.observe import Observation
from canopy_lab.characterize.runs import PolicyRun, TraceSample, run_all
from canopy_lab.sim.stack import lru_curve

LRU_SHARES = (0.25, 0.5, 0.75, 0.9, 0.98)
"""Capacities tried: where LRU has this share of the ideal hits. The trace says what is small."""
MIDDLE = 1
"""The one of them at which the winner has to beat LRU, and categories are compared."""
CANDIDATES: tuple[tuple[str, str, tuple[tuple[str, object], ...]], ...] = (
    ("lru", "lru", ()),
    ("s3fifo", "s3fifo", ()),
    ("gdfs", "gdfs", ()),
    ("wa", "wa", ()),
    ("wa, exponential", "wa", (("model", "exponential"),)),
)
"""(name in the report, name a user types, options)."""
RESAMPLES = 1000
PLACEBOS = (1, 2, 3)
"""Seeds of the shuffles."""
RUNS = len(LRU_SHARES) * (len(CANDIDATES) + len(PLACEBOS)) + 3
"""Runs of the simulator that ``recommend`` makes at most."""
WINDOWS = 50
LEAST_CLUSTERS = 30


@dataclass(frozen=True, slots=True)
class Gain:
    """Hit ratio of the recommended policy minus that of LRU, in points (hundredths), tokens."""

    lru_share: float
    """LRU has this share of the ideal hits here."""
    fraction: float
    """The capacity as a share of the distinct blocks."""
    capacity_blocks: int
    lru_hit_ratio: float
    hit_ratio: float
    points: float
    low: float
    high: float
    """95 % interval over ``clusters``."""
    placebo_points: float
    """The same gain with shuffled labels, mean of the placebo seeds."""
    placebo_low: float
    placebo_high: float
    """Least and most of the placebo seeds."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The report's recommendation. Hit ratios are of tokens, 0 to 1; the simulator's own blocks."""

    policy: str
    policy_options: dict[str, object]
    reason: str
    categories: str
    categories_reason: str
    knee_blocks: int
    """Where the policy has 90 % of the ideal hits, interpolated between the capacities tried;
    all distinct blocks where none of them is enough."""
    knee_fraction: float
    knee_bytes: int
    gains: tuple[Gain, ...]
    clusters: str
    cluster_count: int
    label_gain: dict[str, float]
    """Points over LRU at ``label_fraction`` by the labels the policy sees: type, turn, both, none."""
    label_fraction: float
    table: dict[str, tuple[float, ...]]
    """Hit ratio by policy, one entry a capacity of ``fractions``."""
    fractions: tuple[float, ...]
    capacities: tuple[int, ...]
    """In blocks of ``block_tokens``, as simulated."""
    capacity_bytes: tuple[int, ...]
    ideal_hit_ratio: float
    requests: int
    block_tokens: int
    cut: bool


def recommend(
    seen: Observation,
    prepared: TraceSample,
    bytes_per_token: int,
    *,
    jobs: int | None = None,
    seed: int = 1,
    progress: Callable[[], object] = lambda: None,
) -> Recommendation:
    """Simulate, compare and decide. ``prepared`` begins with the first request of ``seen``."""
    capacities = _capacities(prepared)
    first = [PolicyRun(policy, c, options) for c in capacities for _, policy, options in CANDIDATES]
    results = run_all(prepared, first, jobs, progress)
    tokens = np.array([r.input_tokens for r in prepared.requests], np.int64)
    total = max(int(tokens.sum()), 1)

    def ratio(run: PolicyRun) -> float:
        return 1.0 - float(results[run].sum()) / total

    table = {
        name: tuple(ratio(PolicyRun(policy, c, options)) for c in capacities)
        for name, policy, options in CANDIDATES
    }
    means = {name: float(np.mean(row)) for name, row in table.items()}
    name, policy, options = max(CANDIDATES, key=lambda c: means[c[0]])
    cluster, what = _clusters(seen, len(tokens))
    rng = np.random.default_rng(seed)
    fractions = tuple(c / prepared.distinct_blocks for c in capacities)

    def interval(run: PolicyRun) -> tuple[float, float, float]:
        lru = PolicyRun("lru", run.capacity_blocks)
        return bootstrap(results[lru] - results[run], tokens, cluster, rng)

    middle_gain = interval(PolicyRun(policy, capacities[MIDDLE], options))
    if policy != "lru" and middle_gain[1] <= 0:
        reason = (
            f"{name} is {middle_gain[0]:+.1f} points over LRU where LRU has half of the ideal "
            f"hits, which the spread over {what} does not tell from nothing"
        )
        name, policy, options = CANDIDATES[0]
    elif policy == "lru":
        reason = "no policy tried has a higher mean hit ratio than LRU over the capacities tried"
    else:
        second = max(v for k, v in means.items() if k != name)
        reason = (
            f"the highest hit ratio on average over the capacities tried, "
            f"{100 * means[name]:.1f} %; the next best has {100 * second:.1f} %, LRU "
            f"{100 * means['lru']:.1f} %"
        )

    more = [PolicyRun(policy, c, options, placebo_seed=s) for c in capacities for s in PLACEBOS]
    told = [
        PolicyRun(policy, capacities[MIDDLE], options, labels=v) for v in ("type", "turn", "none")
    ]
    if policy == "lru":
        more, told = [], []
    results |= run_all(prepared, more + told, jobs, progress)
    gains = []
    for share, fraction, c in zip(LRU_SHARES, fractions, capacities):
        run = PolicyRun(policy, c, options)
        points, low, high = interval(run)
        base = ratio(PolicyRun("lru", c))
        shuffled = (
            [
                100.0 * (ratio(PolicyRun(policy, c, options, placebo_seed=s)) - base)
                for s in PLACEBOS
            ]
            if more
            else [0.0]
        )
        gains.append(
            Gain(
                share, fraction, c, base, ratio(run), points, low, high,
                float(np.mean(shuffled)), min(shuffled), max(shuffled),
            )
        )  # fmt: skip
    base = ratio(PolicyRun("lru", capacities[MIDDLE]))
    label_gain = {r.labels: 100.0 * (ratio(r) - base) for r in told}
    if told:
        label_gain["both"] = gains[MIDDLE].points
    ideal = _ideal_tokens(prepared) / total
    knee = _reach([g.hit_ratio for g in gains], capacities, 0.9 * ideal, prepared.distinct_blocks)
    tell, why = _categories(seen, label_gain, gains[MIDDLE])
    block_tokens = prepared.requests[0].block_tokens
    return Recommendation(
        policy=policy,
        policy_options=dict(options),
        reason=reason,
        categories=tell,
        categories_reason=why,
        knee_blocks=knee,
        knee_fraction=knee / max(prepared.distinct_blocks, 1),
        knee_bytes=knee * block_tokens * bytes_per_token,
        gains=tuple(gains),
        clusters=what,
        cluster_count=int(cluster.max()) + 1,
        label_gain=label_gain,
        label_fraction=fractions[MIDDLE],
        table=table,
        fractions=fractions,
        capacities=tuple(capacities),
        capacity_bytes=tuple(c * block_tokens * bytes_per_token for c in capacities),
        ideal_hit_ratio=ideal,
        requests=len(tokens),
        block_tokens=block_tokens,
        cut=prepared.cut,
    )


def bootstrap(
    won: np.ndarray, tokens: np.ndarray, cluster: np.ndarray, rng: np.random.Generator
) -> tuple[float, float, float]:
    """(points, low, high): tokens won per token asked, with the 95 % interval over clusters.

    ``won``, ``tokens`` and ``cluster`` have one entry a request. Clusters are drawn with
    replacement, ``RESAMPLES`` times, each with all its requests.
    """
    count = int(cluster.max()) + 1
    gained = np.bincount(cluster, won, count)
    asked = np.bincount(cluster, tokens, count)
    point = 100.0 * float(gained.sum()) / max(float(asked.sum()), 1.0)
    draws = np.empty(RESAMPLES)
    for i in range(RESAMPLES):
        weight = np.bincount(rng.integers(0, count, count), minlength=count)
        draws[i] = 100.0 * float(weight @ gained) / max(float(weight @ asked), 1.0)
    low, high = np.quantile(draws, (0.025, 0.975))
    return float(point), float(low), float(high)


def _capacities(prepared: TraceSample) -> list[int]:
    lru = lru_curve(prepared.requests)
    return [max(1, blocks_for(lru, share)) for share in LRU_SHARES]


def _reach(ratios: list[float], capacities: list[int], wanted: float, all_blocks: int) -> int:
    """The capacity at which the ratio first reaches ``wanted``, between two tried ones."""
    if ratios[0] >= wanted:
        return capacities[0]
    for i in range(1, len(ratios)):
        if ratios[i] >= wanted:
            part = (wanted - ratios[i - 1]) / (ratios[i] - ratios[i - 1])
            low, high = capacities[i - 1], capacities[i]
            return round(low * (high / low) ** part)
    return all_blocks


def _clusters(seen: Observation, requests: int) -> tuple[np.ndarray, str]:
    talk = seen.conversation[:requests]
    if (talk >= 0).all():
        numbers = np.unique(talk, return_inverse=True)[1]
        if numbers.max() + 1 >= LEAST_CLUSTERS:
            return numbers, "conversations"
    time_s = seen.time_s[:requests]
    width = max(float(time_s[-1] - time_s[0]) / WINDOWS, 1e-9)
    window = np.minimum(((time_s - time_s[0]) / width).astype(int), WINDOWS - 1)
    return np.unique(window, return_inverse=True)[1], "windows of time"


def _ideal_tokens(prepared: TraceSample) -> int:
    known: set[int] = set()
    hits = 0
    for r in prepared.requests:
        run = next((i for i, b in enumerate(r.blocks) if b not in known), len(r.blocks))
        hits += min(run * r.block_tokens, r.input_tokens)
        known.update(r.blocks)
    return hits


def _categories(seen: Observation, gain: dict[str, float], best: Gain) -> tuple[str, str]:
    if not gain:
        return "none", "LRU does not look at categories"
    shuffled = best.points - best.placebo_points
    kinds = len(seen.labels) > 1
    if shuffled < 0.2:
        return "none needed", (
            f"with shuffled labels the gain is {best.placebo_points:+.1f} points, with the true "
            f"ones {best.points:+.1f}: it comes from the reuse curves and what the policy learns by "
            "itself"
        )
    options = ["none", *(["type"] if kinds else []), *(["turn"] if seen.has_turns else []), "both"]
    tell = next(o for o in options if gain[o] >= max(gain.values()) - 0.2)
    names = {
        "none": "none needed",
        "type": "the request type",
        "turn": "the turn",
        "both": "the request type and the turn",
    }
    said = ", ".join(f"{names[o]} {gain[o]:+.1f}" for o in options)
    return names[tell], (
        f"points over LRU by the labels that the policy sees: {said}; with labels shuffled "
        f"{best.placebo_points:+.1f}"
    )
