"""Advice about one log: simulations, decision and tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from canopy_lab.advise.agents import AgentMemory, find_agent_turns, peak_demand
from canopy_lab.advise.answers import Advice, ArmRow, HitCurve, Tier
from canopy_lab.advise.arms import (
    CANDIDATE_ARMS,
    CANOPY_LRU,
    HINDSIGHT_ARM,
    HINTED_ARMS,
    PLACEBO_ARM,
    SGLANG_LRU,
    WA,
    ArmCapacity,
    CacheArm,
    Uncached,
    hit_ratio,
    run_arms,
)
from canopy_lab.advise.bootstrap import assign_clusters, bootstrap
from canopy_lab.advise.costs import DISK_BYTES_PER_S, ArmCost, CostModel
from canopy_lab.advise.decide import Gain, Recommendation, decide
from canopy_lab.advise.sample import LogSample
from canopy_lab.sim.stack import LRUCurve, lru_curve
from canopy_lab.sim.system.engine_profile import EngineProfile

LOST_POINTS = 5.0
"""Points of the prompt tokens that LRU loses at the default capacity, at most half of the repeats."""
CAPACITY_FACTORS = (0.25, 0.5, 2.0, 4.0)
"""Multiples of the capacity at which policies are also compared."""
CURVE_POINTS = 200
MIN_REQUESTS = 30
"""Smallest log on which a policy is advised."""


@dataclass(frozen=True, slots=True)
class LowerTier:
    """A tier below the device. ``label``: a noun phrase."""

    label: str
    gigabytes: float
    is_disk: bool = False


def advise(
    sample: LogSample,
    profile: EngineProfile,
    *,
    capacity_tokens: float | None = None,
    capacity_from: str = "given",
    tiers: Sequence[LowerTier] = (),
    jobs: int | None = None,
    seed: int = 1,
    set_total: Callable[[int], object] = lambda n: None,
    progress: Callable[[], object] = lambda: None,
) -> Advice:
    """Simulate and decide. ``set_total`` receives the largest number of simulations.

    ``capacity_from``: source of ``capacity_tokens``. Without a capacity, the LRU curve sets it
    (``LOST_POINTS``).
    """
    curve = lru_curve(sample.requests)
    if capacity_tokens is None:
        capacity_tokens, capacity_from = lossy_capacity(sample, curve), "curve"
    capacity = _Capacity(float(capacity_tokens), capacity_from)
    return _Adviser(sample, profile, curve, capacity, tuple(tiers), seed).advise(
        jobs, set_total, progress
    )


def advise_policy(
    sample: LogSample, profile: EngineProfile, capacity_tokens: float, *, jobs: int | None = None
) -> tuple[CacheArm, Recommendation]:
    """Return only the recommendation of ``advise``. The arm ``lru`` means to keep SGLang's LRU."""
    capacity = _Capacity(float(capacity_tokens), "given")
    adviser = _Adviser(sample, profile, lru_curve(sample.requests), capacity, (), 1)
    return adviser.advise_policy(jobs)


def lossy_capacity(sample: LogSample, curve: LRUCurve) -> float:
    """Return the largest capacity, in the server's tokens, at which LRU loses ``LOST_POINTS``."""
    hits = _hits(curve, np.arange(len(curve.token_hits_at)))
    target_hits = hits[-1] - min(LOST_POINTS / 100, hits[-1] / 2)
    return sample.tokens_of(max(1, int(np.searchsorted(hits, target_hits, side="right")) - 1))


@dataclass(frozen=True, slots=True)
class _Capacity:
    tokens: float
    origin: str

    def __str__(self) -> str:
        size = f"{self.tokens:,.0f} tokens"
        if self.origin == "log":
            return f"{size} (max_total_num_tokens in the log)"
        if self.origin == "ranks":
            return (
                f"{size} (max_total_num_tokens of all DP ranks in the log, as if each conversation "
                "stayed on one of them)"
            )
        if self.origin == "curve":
            return (
                f"{size} (assumed, the largest at which LRU has lost {LOST_POINTS:.0f} points of what "
                "repeats, or half of it; give yours with --capacity-tokens)"
            )
        return size


class _Adviser:
    """Simulates arms of a sample at capacities in its blocks, against SGLang's LRU (``base``)."""

    def __init__(
        self,
        sample: LogSample,
        profile: EngineProfile,
        curve: LRUCurve,
        capacity: _Capacity,
        lower_tiers: tuple[LowerTier, ...],
        seed: int,
    ) -> None:
        self.sample, self.profile, self.curve = sample, profile, curve
        self.repeats = float(curve.token_hits_at[-1] / max(curve.tokens, 1))
        self.capacity, self.capacity_tokens = capacity, capacity.tokens
        self.lower_tiers, self.seed = lower_tiers, seed
        self.tokens = np.array([r.input_tokens for r in sample.requests], np.int64)
        self.clusters, self.cluster_kind = assign_clusters(sample)
        self.blocks = sample.blocks_of(self.capacity_tokens)
        # Node sizes are not scaled down with the cache, so evicting whole nodes would cost too much.
        self.base = SGLANG_LRU if sample.one_in == 1 else replace(SGLANG_LRU, whole_nodes=False)
        self.cost_model = CostModel(profile, self.tokens, sample.token_scale)
        self.results: dict[ArmCapacity, Uncached] = {}
        self.gains: dict[ArmCapacity, Gain] = {}

    def advise(
        self, jobs: int | None, set_total: Callable[[int], object], progress: Callable[[], object]
    ) -> Advice:
        curve_arms = (self.base, CANOPY_LRU, WA, HINDSIGHT_ARM)
        other_sizes = [self.sample.blocks_of(self.capacity_tokens * f) for f in CAPACITY_FACTORS]
        row_arms = (self.base, *CANDIDATE_ARMS, PLACEBO_ARM, *HINTED_ARMS, HINDSIGHT_ARM)
        base_runs: list[ArmCapacity] = [(arm, self.blocks) for arm in row_arms]
        base_runs += [(arm, blocks) for arm in curve_arms for blocks in other_sizes]
        base_runs += [(self.base, self._tier_blocks(tier)) for tier in self.lower_tiers]
        is_agents = find_agent_turns(self.sample.requests)
        agent_requests = [r for r, is_agent in zip(self.sample.requests, is_agents) if is_agent]
        sessions, agent_blocks = peak_demand(agent_requests)
        base_runs.append((self.base, max(self.blocks, agent_blocks)))
        set_total(len(set(base_runs)) + len(self.lower_tiers))
        self._simulate(base_runs, jobs, progress)
        decision = self._decide()
        advised = self._advised_arm(decision)
        advised_runs = [(advised, self._tier_blocks(tier)) for tier in self.lower_tiers]
        self._simulate([run for run in advised_runs if run not in self.results], jobs, progress)
        prefill_s = self.cost_model.prefill_s(self.results[self.base, self.blocks])
        prefill_busy = float(prefill_s.mean()) * self._request_rate()
        base = self.cost_model.cost(self.results[self.base, self.blocks])
        return Advice(
            decision=decision,
            sample=self.sample.to_json(),
            profile=self.profile.name,
            profile_source=self.profile.source,
            kv_bytes_per_token=self.profile.kv_bytes_per_token,
            capacity_tokens=self.capacity_tokens,
            capacity_from=self.capacity.origin,
            repeats=self.repeats,
            distinct_tokens=self.sample.tokens_of(self.sample.distinct_blocks),
            lru=self._lru_curve(),
            rows=tuple(self._make_row(arm, base, _row_kind(arm)) for arm in row_arms),
            others={arm.label: self._curve_of(arm, other_sizes) for arm in curve_arms},
            tiers=tuple(self._make_tiers(advised, base)),
            agents=self._agents(is_agents, sessions, agent_blocks),
            prefill_busy=prefill_busy,
            clusters=int(self.clusters.max()) + 1,
            cluster_kind=self.cluster_kind,
            scaled_prompts=self.blocks * self.sample.block_tokens / max(self.tokens.mean(), 1.0),
            placebo_points=self._gain(PLACEBO_ARM, self.blocks).points,
            too_long=float((self.tokens * self.sample.token_scale > self.capacity_tokens).mean()),
        )

    def advise_policy(self, jobs: int | None) -> tuple[CacheArm, Recommendation]:
        """Return the decision without costs and tiers."""
        runs = [(arm, self.blocks) for arm in (self.base, *CANDIDATE_ARMS, HINDSIGHT_ARM)]
        self._simulate(runs, jobs, lambda: None)
        decision = self._decide()
        return self._advised_arm(decision), decision

    def _advised_arm(self, decision: Recommendation) -> CacheArm:
        gain = decision.gain
        return next((a for a in CANDIDATE_ARMS if gain and a.label == gain.label), self.base)

    def _simulate(
        self, runs: Sequence[ArmCapacity], jobs: int | None, progress: Callable[[], object]
    ) -> None:
        if not self.repeats:  # no cache of any size hits
            self.results |= dict.fromkeys(runs, self.tokens)
        elif runs:
            self.results |= run_arms(
                self.sample.requests, runs, jobs=jobs, seed=self.seed, progress=progress
            )

    def _gain(self, arm: CacheArm, capacity_blocks: int) -> Gain:
        if (arm, capacity_blocks) not in self.gains:
            self.gains[arm, capacity_blocks] = self._new_gain(arm, capacity_blocks)
        return self.gains[arm, capacity_blocks]

    def _new_gain(self, arm: CacheArm, capacity_blocks: int) -> Gain:
        base, misses = self.results[self.base, self.blocks], self.results[arm, capacity_blocks]
        points = low = high = 0.0
        if (base != misses).any():
            rng = np.random.default_rng(self.seed)
            points, low, high = bootstrap(base - misses, self.tokens, self.clusters, rng)
        return Gain(arm.label, arm.flag, hit_ratio(misses, self.tokens), points, low, high)

    def _decide(self) -> Recommendation:
        base = hit_ratio(self.results[self.base, self.blocks], self.tokens)
        return decide(
            base,
            self.repeats,
            hit_ratio(self.results[HINDSIGHT_ARM, self.blocks], self.tokens),
            [self._gain(arm, self.blocks) for arm in CANDIDATE_ARMS],
            capacity=str(self.capacity),
            memory=self._memory_sentence(base),
            few_requests=len(self.tokens) if len(self.tokens) < MIN_REQUESTS else 0,
        )

    def _memory_sentence(self, base: float) -> str:
        """Return a sentence on the smallest tier with nearly the largest gain, if above a point."""
        tiers = sorted(self.lower_tiers, key=lambda tier: tier.gigabytes)
        gains = [
            100 * (hit_ratio(self.results[self.base, self._tier_blocks(tier)], self.tokens) - base)
            for tier in tiers
        ]
        if max(gains, default=0.0) < 1.0:
            return ""
        points, tier = next((p, tier) for p, tier in zip(gains, tiers) if p > max(gains) - 0.1)
        hosts = [tier.label for tier in self.lower_tiers if not tier.is_disk]
        label = f"{hosts[-1]} and {tier.label}" if tier.is_disk and hosts else tier.label
        return f" {label[0].upper()}{label[1:]} would add {points:.1f} points."

    def _agents(self, agents: NDArray[np.bool_], sessions: int, blocks: int) -> AgentMemory | None:
        if not blocks:
            return None
        sizes = self.blocks, max(self.blocks, blocks)
        hits = (
            hit_ratio(self.results[self.base, size][agents], self.tokens[agents]) for size in sizes
        )
        return AgentMemory(sessions * self.sample.one_in, self.sample.tokens_of(blocks), *hits)

    def _make_row(self, arm: CacheArm, base: ArmCost, kind: str) -> ArmRow:
        cost = self.cost_model.cost(self.results[arm, self.blocks])
        change = cost.gpu_s_per_request / base.gpu_s_per_request - 1.0
        return ArmRow(self._gain(arm, self.blocks), cost, self._saved(base, cost), change, kind)

    def _saved(self, base: ArmCost, cost: ArmCost) -> float:
        """Return the GPU seconds saved per hour of the log."""
        return (base.gpu_s_per_request - cost.gpu_s_per_request) * self._request_rate() * 3600

    def _request_rate(self) -> float:
        return self.sample.requests_in_log / max(self.sample.span_s, 1.0)

    def _tier_blocks(self, lower_tier: LowerTier) -> int:
        tokens = lower_tier.gigabytes * 1e9 / self.profile.kv_bytes_per_token
        return self.sample.blocks_of(max(tokens, self.capacity_tokens))

    def _make_tiers(self, advised: CacheArm, base: ArmCost) -> list[Tier]:
        tiers = [self._make_tier("device alone", self.blocks, advised, [], base)]
        host_tiers: list[tuple[int, float]] = []
        host_rate = self.profile.host.read_bytes_per_s if self.profile.host else DISK_BYTES_PER_S
        disk_rate = self.profile.disk.read_bytes_per_s if self.profile.disk else DISK_BYTES_PER_S
        for tier in self.lower_tiers:
            blocks = self._tier_blocks(tier)
            # A disk is read through the largest host tier; larger hosts replace smaller ones.
            reads = [*host_tiers, (blocks, disk_rate)] if tier.is_disk else [(blocks, host_rate)]
            label = "and " * tier.is_disk + tier.label
            tiers.append(self._make_tier(label, blocks, advised, reads, base))
            if not tier.is_disk:
                host_tiers = [(blocks, host_rate)]
        return tiers

    def _make_tier(
        self, label: str, blocks: int, arm: CacheArm, reads: list[tuple[int, float]], base: ArmCost
    ) -> Tier:
        lru, lru_cost = self._gain_and_cost(self.base, blocks, reads)
        gain, cost = self._gain_and_cost(arm, blocks, reads)
        tokens = self.sample.tokens_of(blocks)
        return Tier(label, tokens, lru, lru_cost, gain, cost, self._saved(base, cost))

    def _gain_and_cost(
        self, arm: CacheArm, blocks: int, reads: list[tuple[int, float]]
    ) -> tuple[Gain, ArmCost]:
        """Return the gain at the largest tier, and the cost with the waits for tiers below the device."""
        waits_s = np.zeros(len(self.tokens))
        misses_above = self.results[arm, self.blocks]
        for tier_blocks, bytes_per_s in reads:
            misses = self.results[arm, tier_blocks]
            waits_s = waits_s + self.cost_model.transfer_s(misses_above - misses, bytes_per_s)
            misses_above = misses
        cost = self.cost_model.cost(self.results[arm, blocks], waits_s)
        return self._gain(arm, blocks), cost

    def _lru_curve(self) -> HitCurve:
        """Return the curve of an LRU that evicts only the needed tokens, from stack distances."""
        max_blocks = max(self.sample.distinct_blocks, self.blocks, 2)
        sizes = np.unique(np.geomspace(1, max_blocks, CURVE_POINTS).astype(np.int64))
        hits = _hits(self.curve, sizes)
        return HitCurve(tuple(self.sample.tokens_of(int(s)) for s in sizes), tuple(hits.tolist()))

    def _curve_of(self, arm: CacheArm, other_blocks: list[int]) -> HitCurve:
        capacities = sorted({self.blocks, *other_blocks})
        return HitCurve(
            tuple(self.sample.tokens_of(blocks) for blocks in capacities),
            tuple(hit_ratio(self.results[arm, blocks], self.tokens) for blocks in capacities),
        )


def _hits(curve: LRUCurve, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    tokens_hit = curve.token_hits_at[np.minimum(sizes, len(curve.token_hits_at) - 1)]
    return tokens_hit / max(curve.tokens, 1)


def _row_kind(arm: CacheArm) -> str:
    if arm.label == SGLANG_LRU.label:
        return "baseline"
    if arm.is_hindsight:
        return "bound"
    if arm.is_placebo:
        return "placebo"
    return "hints" if arm.hints else "policy"
