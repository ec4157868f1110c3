"""What other policies, and other capacities, would hit on the requests that a server serves.

Shadow caches (``whatif/sampled_caches.py``) serve a sample of the blocks. They know nothing of
requests in flight, of pages or of what a tier loads; so the difference that they show, between an
arm and the policy that runs, is added to what the server really hit (a control variate).
Only the requests and their stamps count: all tensor-parallel ranks hold the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.registry import live_names, make_policy, options_of
from sglang_canopy.records import Request
from sglang_canopy.whatif.account import Account
from sglang_canopy.whatif.floor import Floor
from sglang_canopy.whatif.origins import Origins
from sglang_canopy.whatif.sampled_caches import Arm, Sample, SampledCaches, covered_tokens
from sglang_canopy.whatif.shadow_cache import as_sampled

NOW = "now"
"""The capacity that the server has."""
LRU = "canopy-lru"
SGLANGS_LRU = "lru"
SUMS = ("prompt_tokens", "hit_tokens", "sampled_tokens")
"""What the server was asked for and hit, and what was sampled of it."""
TIMED = 17
"""One request of so many is timed: reading a thread's clock can take longer than all else."""
LEAST_REQUESTS = 200
"""Sampled requests below which no estimate is worth a word."""
LEARN_FROM_ALL_PER_S = 32.0
"""With more requests a second, policies learn from those alone of which a block is sampled."""


class Question(NamedTuple):
    """One arm: a policy's name and a capacity's."""

    policy: str
    capacity: str


_LRU_NOW = Question(LRU, NOW)


@dataclass(frozen=True, slots=True)
class Memory:
    """The tiers in memory, in tokens."""

    device_tokens: int
    host_tokens: int = 0
    exclusive: bool = False
    """Whether the host holds only what the device has not (``write_back``)."""

    def total(self, factor: float = 1.0) -> int:
        """Different tokens that fit, with ``factor`` times the host (the device, where there is no
        host)."""
        device, host = self.device_tokens, self.host_tokens
        if not host:
            return int(device * factor)
        host = int(host * factor)
        return device + host if self.exclusive else max(device, host)

    def label(self, factor: float) -> str:
        """What the capacity is called in metrics."""
        if factor == 1.0:
            return NOW
        return f"{'host' if self.host_tokens else 'device'} x{factor:g}"


@dataclass(frozen=True, slots=True)
class MeterSetup:
    """Which arms a meter has, and how it samples."""

    policies: Sequence[str] = (LRU, "wa")
    """Names as ``--radix-eviction`` takes them."""
    factors: Sequence[float] = (1.0, 2.0)
    one_in: int | None = None
    """Of so many blocks one is sampled; ``None``: all while there are few requests."""
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options of policies, by name."""
    memory_s: float = 3600.0
    """A request's weight falls to 1/e within so many seconds."""


class Meter:
    """The meter of one cache. All calls from the scheduler's thread, but for ``rows`` and ``stats``.

    ``running``: the name of the policy that ranks the device, SGLang's own names too.
    """

    def __init__(self, setup: MeterSetup, memory: Memory, running: str) -> None:
        self.setup = setup
        self.memory = memory
        self.spent_s = 0.0
        """CPU seconds in the scheduler's thread, by a sample."""
        self.sums = dict.fromkeys(SUMS, 0)
        """Tokens since the start, over every policy that ran."""
        self.shadow_tokens: dict[str, int] = {}
        """What each policy's shadow cache, of the server's own size, hit of what was sampled."""
        self._seen = 0
        self._origins = Origins()
        self._account = Account(setup.memory_s)
        self._teachers: dict[str, Policy] = {}
        self.caches = SampledCaches(setup.one_in)
        self._run(running)

    def runs(self, running: str, policy: Policy | None = None, keep_floor: bool = False) -> None:
        """From now on the server runs another policy. ``policy``: the one that ranks; arms of its
        name get its options. ``keep_floor``: for as long as the policy that ran, or LRU, is behind
        (``keeper``)."""
        self._account.begin()
        if policy is not None:
            self._follow(running, policy)
        self._run(running, keep_floor)

    def _follow(self, name: str, policy: Policy) -> None:
        options, teacher = options_of(policy), self._teachers.get(name)
        if teacher is None or options_of(teacher) != options:
            self._teachers[name] = make_policy(name, options)
            self.caches.remove([q for q in self._questions if q.policy == name])

    @property
    def keeper(self) -> str:
        """Who has to rank: the policy that was asked for, or ``canopy-lru`` while that one is
        behind its floor."""
        return LRU if self._floor.behind else self._wanted

    @property
    def undecided(self) -> str | None:
        """Why the estimates do not mean anything yet; ``None`` where they do."""
        if self._counted < LEAST_REQUESTS:
            return f"too few requests: {self._counted} of {LEAST_REQUESTS}"
        if not any(self.caches.has_evicted(q) for q in self._questions if q.capacity == NOW):
            return "the cache has not filled: nothing to win"
        return None

    def ended(self, request: Request, hit_tokens: int) -> None:
        """A request ended; ``hit_tokens`` of its prompt were on the device or the host."""
        self._seen += 1
        if self._seen % TIMED:
            self._hear(request, hit_tokens)
            return
        begin = time.thread_time()
        self._hear(request, hit_tokens)
        self.spent_s += TIMED * (time.thread_time() - begin)

    def _hear(self, request: Request, hit_tokens: int) -> None:
        caches, account = self.caches, self._account
        tokens = request.block_tokens
        missed = max(0, covered_tokens(request) - hit_tokens // tokens * tokens)
        account.serve(request.time, request.prompt_tokens, hit_tokens, missed)
        self.sums["prompt_tokens"] += request.prompt_tokens
        self.sums["hit_tokens"] += hit_tokens
        sample = self._observe(request)
        if sample is None:
            return
        self._counted += 1
        served = len(caches.sampled(request.path[: hit_tokens // tokens]))
        running = Question(self.running, NOW)
        account.sample(
            sample, sample.hit_blocks.get(running, served), served, tokens, caches.one_in
        )
        self._hold(sample)

    def _hold(self, sample: Sample) -> None:
        """Hold the policy that was asked for against LRU."""
        saved, wanted = sample.saved_tokens, Question(self._wanted, NOW)
        self.sums["sampled_tokens"] += sample.prompt_tokens
        for name, tokens in saved.items():
            if isinstance(name, Question) and name.capacity == NOW:
                self.shadow_tokens[name.policy] = self.shadow_tokens.get(name.policy, 0) + tokens
        if _LRU_NOW in saved and wanted in saved:
            other = wanted if self._floor.behind else _LRU_NOW
            doubt = 2.0 * self._account.sampling_error(other) if self.caches.one_in > 1 else 0.0
            self._floor.compare(saved[wanted], saved[_LRU_NOW], sample.prompt_tokens, doubt)

    def rows(self) -> list[dict[str, Any]]:
        """Each arm's estimated hit ratio, and the running policy's own, which is measured."""
        account = self._account
        return [
            {
                "policy": name.policy,
                "capacity": name.capacity,
                "tokens": self._tokens[name.capacity],
                "hit_ratio": round(_share(account.served_ratio + account.lead(name)), 5),
                "sampled_hit_ratio": round(account.sampled_ratio(name), 5),
                "standard_error": round(account.error(name), 5),
                "sampling_error": round(account.sampling_error(name), 5),
                "running": name == (self.running, NOW),
            }
            for name in self._questions
        ]

    def stats(self) -> dict[str, Any]:
        """Everything, for operators."""
        return {
            "running": self.running,
            "hit_ratio": round(self._account.served_ratio, 5),
            "arms": self.rows(),
            "one_block_in": self.caches.one_in,
            "sampled_requests": self.caches.seen,
            "spent_s": round(self.spent_s, 4),
            "undecided": self.undecided,
            "sums": dict(self.sums),
            "shadow_tokens": dict(self.shadow_tokens),
            "floor": {
                "policy": self._wanted,
                "behind": self._floor.behind,
                "falls": self._floor.falls,
            },
        }

    def learnt(self, name: str) -> Mapping[str, Any]:
        """What the arm of policy ``name`` has learnt, for ``Policy.restore``."""
        teacher = self._teachers.get(name)
        return {} if teacher is None else teacher.state()

    # ---- arms ----

    def _run(self, running: str, keep_floor: bool = False) -> None:
        self.running = running
        if not keep_floor:
            self._wanted = running
            self._floor = Floor(self.memory.total())
        self._counted = 0
        self._tokens = {self.memory.label(f): self.memory.total(f) for f in self.setup.factors}
        self._tokens = {NOW: self.memory.total(), **self._tokens}
        self._questions: list[Question] = []
        names = dict.fromkeys((running, self._wanted, *self.setup.policies))
        for name in names:
            whole_nodes = name == SGLANGS_LRU
            if name not in live_names() and not whole_nodes:
                continue  # a policy of SGLang's that has no equal here
            teacher = self._teacher(name)
            for capacity, tokens in self._tokens.items():
                question = Question(name, capacity)
                self._questions.append(question)
                self.caches.add(question, Arm(teacher.twin, tokens, whole_nodes))

    def _teacher(self, name: str) -> Policy:
        teacher = self._teachers.get(name)
        if teacher is None:
            teacher = make_policy(name, self.setup.configs.get(name, {}))
            self._teachers[name] = teacher
        return teacher

    def _observe(self, request: Request) -> Sample | None:
        """Learn from a request, and serve what of it is in the sample in the shadow caches."""
        caches = self.caches
        picked = caches.pick(request)
        if picked is None and (not request.path or caches.requests_per_s > LEARN_FROM_ALL_PER_S):
            return None
        origin = self._origins.of(request.path, request.prompt_tokens, request.block_tokens)
        copy = as_sampled(request, origin)
        copy.label = _labelled(self._teachers.values(), copy)
        return None if picked is None else caches.serve(copy, picked)


def _share(ratio: float) -> float:
    return min(1.0, max(0.0, ratio))


def _labelled(teachers: Iterable[Policy], request: Request) -> str:
    """Let every policy learn from a request that has ended; the label of the first that refines it."""
    label = None
    path = request.path
    prompt_blocks = -(-request.prompt_tokens // request.block_tokens)
    for teacher in teachers:
        if type(teacher).arrive is Policy.arrive:
            continue
        request.label = None
        request.path = path[:prompt_blocks]
        request.label = teacher.arrive(request)
        request.path = path
        given = teacher.finish(request)
        label = given if label is None else label
    return label or request.category
