"""Estimate the hits of other policies and capacities on a server's requests.

Shadow caches (``whatif/sampled_caches.py``) serve a sample of the blocks. They ignore requests in
flight, pages and tier loads, so only the difference between an arm and the running policy's shadow
is used, added to the server's measured hits (a control variate). The estimate depends on requests
and their stamps alone and is therefore identical on all tensor-parallel ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.registry import live_names, make_policy
from sglang_canopy.records import Request
from sglang_canopy.whatif.estimator import HitRatioEstimator
from sglang_canopy.whatif.floor import Floor
from sglang_canopy.whatif.sampled_caches import (
    MIN_BLOCKS,
    ModelledCache,
    Origins,
    SampledCaches,
    ShadowResult,
    copy_for_shadow,
    covered_tokens,
)

NOW_LABEL = "now"
"""Label of the server's actual capacity."""
LRU = "canopy-lru"
SGLANGS_LRU = "lru"
TIMED_STRIDE = 17
"""Time one request in this many: reading the thread clock can cost more than the work."""
MIN_REQUESTS = 200
"""Sampled requests required before estimates are reported."""
TOO_SHORT, UNSAMPLED = "shorter than a block", "without a sampled block"
UNCOUNTED = (TOO_SHORT, UNSAMPLED)
"""Reasons why a finished request does not count."""


class ShadowArm(NamedTuple):
    """An arm: policy name and capacity label."""

    policy: str
    capacity: str


_LRU_ARM = ShadowArm(LRU, NOW_LABEL)


@dataclass(frozen=True, slots=True)
class TierTokens:
    """Memory tiers, in tokens."""

    device_tokens: int
    host_tokens: int = 0
    is_exclusive: bool = False
    """True if the host holds only tokens that the device does not (``write_back``)."""

    def total(self, factor: float = 1.0) -> int:
        """Return the distinct tokens that fit, with the lowest tier scaled by ``factor``."""
        device, host = self.device_tokens, self.host_tokens
        if not host:
            return int(device * factor)
        host = int(host * factor)
        return device + host if self.is_exclusive else max(device, host)

    def label(self, factor: float) -> str:
        """Return the metric label of a capacity."""
        if factor == 1.0:
            return NOW_LABEL
        return f"{'host' if self.host_tokens else 'device'} x{factor:g}"


@dataclass(frozen=True, slots=True)
class MeterSetup:
    """Arms and sampling of a meter."""

    policies: Sequence[str] = (LRU, "wa")
    """Names as in ``--radix-eviction``."""
    factors: Sequence[float] = (1.0, 2.0)
    """Multiples of the lowest tier's capacity."""
    sample_stride: int | None = None
    """Sample one block in this many; ``None``: fixed by the size of the caches."""
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Policy options, by policy name."""
    floor: bool = True
    """Whether LRU ranks while the policy is behind it."""
    memory_s: float = 3600.0
    """A request's weight decays to 1/e within this time."""


class Meter:
    """Meter of one cache. Only ``describe_arms`` and ``stats`` may be called outside the scheduler's thread.
    ``running``: name of the policy that ranks the device; SGLang's own names are allowed."""

    def __init__(self, setup: MeterSetup, memory: TierTokens, running: str) -> None:
        self.setup = setup
        self.memory = memory
        self.spent_s = 0.0
        """CPU seconds of the scheduler's thread, extrapolated from timed requests."""
        self.prompt_tokens = 0
        """Prompt tokens of all recorded requests, across changes of policy."""
        self.uncounted_requests = dict.fromkeys(UNCOUNTED, 0)
        """Finished requests that do not count, by reason, since the start."""
        self._finished_requests = 0
        self._origins = Origins()
        self._estimator = HitRatioEstimator(setup.memory_s)
        self._learners: dict[str, Policy] = {}
        self.caches = SampledCaches(setup.sample_stride)
        self.running = self._configured_policy = running
        self._floor = Floor(memory.total()) if setup.floor else None
        self._sampled_since_restart = 0
        self._add_arms()

    def restart(self, running: str) -> None:
        """Restart the estimates: ``running``, the policy or LRU, ranks from now on."""
        self._estimator.reset()
        self.running = running
        self._sampled_since_restart = 0

    @property
    def is_behind(self) -> bool:
        """Whether the policy is behind LRU, so that LRU should rank."""
        return self._floor is not None and self._floor.is_behind

    @property
    def undecided_reason(self) -> str | None:
        """Reason why the estimates are not usable yet, or ``None``."""
        if any(arm.capacity == NOW_LABEL for arm in self._undersized_arms()):
            return (
                f"too small a sample: one block in {self.caches.sample_stride} leaves a shadow cache fewer "
                f"than {MIN_BLOCKS}"
            )
        if self._sampled_since_restart < MIN_REQUESTS:
            return self._describe_missing()
        if not any(self.caches.has_evicted(arm) for arm in self._arms if arm.capacity == NOW_LABEL):
            return "the cache has not filled: nothing to win"
        return None

    def _describe_missing(self) -> str:
        """Return the counted and the uncounted requests as text."""
        earlier_requests = self.caches.sampled_requests - self._sampled_since_restart
        uncounted = self.uncounted_requests.items()
        notes = [f"{count} {reason} do not count" for reason, count in uncounted if count]
        if earlier_requests:
            notes.insert(0, f"{earlier_requests} counted before the order changed")
        text = f"too few requests: {self._sampled_since_restart} of {MIN_REQUESTS}"
        return f"{text} ({', '.join(notes)})" if notes else text

    def record_request(self, request: Request, hit_tokens: int) -> None:
        """Record a finished request; ``hit_tokens``: prompt tokens hit on device or host."""
        self._finished_requests += 1
        if self._finished_requests % TIMED_STRIDE:
            self._record(request, hit_tokens)
            return
        began_at = time.thread_time()
        self._record(request, hit_tokens)
        self.spent_s += TIMED_STRIDE * (time.thread_time() - began_at)

    def record_parallel_output(self, request: Request) -> None:
        """Record another output (n > 1) of a recorded request; it does not count as a request."""
        self._observe(request, is_repeat=True)

    def _record(self, request: Request, hit_tokens: int) -> None:
        caches, estimator = self.caches, self._estimator
        block_tokens = request.block_tokens
        missed_tokens = covered_tokens(request) - hit_tokens // block_tokens * block_tokens
        estimator.record_served(
            request.time, request.prompt_tokens, hit_tokens, max(0, missed_tokens)
        )
        self.prompt_tokens += request.prompt_tokens
        sample = self._observe(request)
        if sample is None:
            self.uncounted_requests[UNSAMPLED if request.path else TOO_SHORT] += 1
            return
        self._sampled_since_restart += 1
        served_blocks = len(caches.sampled_blocks(request.path[: hit_tokens // block_tokens]))
        control_arm = ShadowArm(self.running, NOW_LABEL)
        control_blocks = sample.hit_blocks.get(control_arm, served_blocks)
        estimator.record_sample(
            sample, control_blocks, served_blocks, block_tokens, caches.sample_stride
        )
        self._update_floor(sample)

    def _update_floor(self, sample: ShadowResult) -> None:
        if self._floor is None:
            return
        saved_tokens, arm = sample.saved_tokens, ShadowArm(self._configured_policy, NOW_LABEL)
        if _LRU_ARM in saved_tokens and arm in saved_tokens and not self.caches.is_too_small(arm):
            idle_arm = arm if self._floor.is_behind else _LRU_ARM
            is_sampled = self.caches.sample_stride > 1
            error_share = 2.0 * self._estimator.sampling_error(idle_arm) if is_sampled else 0.0
            hits = saved_tokens[arm], saved_tokens[_LRU_ARM]
            self._floor.compare(*hits, sample.prompt_tokens, error_share)

    def _undersized_arms(self) -> list[ShadowArm]:
        """Return the arms with too few sampled blocks, which are excluded from decisions."""
        return [arm for arm in self._arms if self.caches.is_too_small(arm)]

    def describe_arms(self) -> list[dict[str, Any]]:
        """Return the hit ratio of each arm: measured for the running policy, else estimated."""
        estimator, undersized = self._estimator, self._undersized_arms()
        return [
            {
                "policy": arm.policy,
                "capacity": arm.capacity,
                "tokens": self._capacities[arm.capacity],
                "hit_ratio": round(_clamp(estimator.served_ratio() + estimator.lead(arm)), 5),
                "sampled_hit_ratio": round(estimator.sampled_ratio(arm), 5),
                "standard_error": round(estimator.standard_error(arm), 5),
                "sampling_error": round(estimator.sampling_error(arm), 5),
                "running": arm == (self.running, NOW_LABEL),
            }
            for arm in self._arms
            if arm.capacity == NOW_LABEL or arm not in undersized
        ]

    def stats(self) -> dict[str, Any]:
        return {
            "running": self.running,
            "hit_ratio": round(self._estimator.served_ratio(), 5),
            "arms": self.describe_arms(),
            "one_block_in": self.caches.sample_stride,
            "too_small": [" ".join(arm) for arm in self._undersized_arms()],
            "sampled_requests": self.caches.sampled_requests,
            "spent_s": round(self.spent_s, 4),
            "undecided": self.undecided_reason,
            "floor": None
            if self._floor is None
            else {
                "policy": self._configured_policy,
                "behind": self._floor.is_behind,
                "falls": self._floor.falls,
            },
        }

    # ---- arms ----

    def _add_arms(self) -> None:
        memory, factors = self.memory, self.setup.factors
        self._capacities = {NOW_LABEL: memory.total()}
        self._capacities |= {memory.label(factor): memory.total(factor) for factor in factors}
        self._arms: list[ShadowArm] = []
        names = dict.fromkeys((self._configured_policy, *self.setup.policies))
        for name in names:
            whole_nodes = name == SGLANGS_LRU
            if name not in live_names() and not whole_nodes:
                continue  # an SGLang policy without a Canopy equivalent
            learner = self._get_learner(name)
            for capacity, tokens in self._capacities.items():
                arm = ShadowArm(name, capacity)
                self._arms.append(arm)
                self.caches.add(arm, ModelledCache(learner.twin, tokens, whole_nodes))

    def _get_learner(self, name: str) -> Policy:
        learner = self._learners.get(name)
        if learner is None:
            learner = make_policy(name, self.setup.configs.get(name, {}))
            self._learners[name] = learner
        return learner

    def _observe(self, request: Request, is_repeat: bool = False) -> ShadowResult | None:
        """Learn from a request and serve its sampled blocks in the shadow caches. ``is_repeat``: the
        policies have learnt from the request before."""
        caches = self.caches
        sampled_path = caches.sample_path(request)
        if not request.path:
            return None
        origin = self._origins.number_of(request.path, request.prompt_tokens, request.block_tokens)
        copy = copy_for_shadow(request, origin)
        copy.label = _learn_label(self._learners.values(), copy, is_repeat)
        return None if sampled_path is None else caches.serve(copy, sampled_path)


def _clamp(ratio: float) -> float:
    return min(1.0, max(0.0, ratio))


def _learn_label(learners: Iterable[Policy], request: Request, is_repeat: bool) -> str:
    """Let each policy learn from a finished request; return the first refined label."""
    label = None
    path = request.path
    prompt_blocks = -(-request.prompt_tokens // request.block_tokens)
    for learner in learners:
        if type(learner).arrive is Policy.arrive:
            continue
        request.label = None
        if not is_repeat:
            request.path = path[:prompt_blocks]
            request.label = learner.arrive(request)
            request.path = path
        learner_label = learner.finish(request)
        label = learner_label if label is None else label
    return label or request.category
