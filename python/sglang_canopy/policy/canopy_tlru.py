"""``canopy-tlru``: Tail-Optimized LRU (arXiv 2510.15152) that trims inside a node.

A conversation of ``L`` tokens whose next prompt adds ``Q`` tokens meets the target if at most
``xi`` tokens remain to prefill, so if its first L + Q - xi tokens are cached. Tokens beyond these
are free: evicting them misses no target. Free tokens are evicted first, then leaves in LRU order.
``L`` is the conversation's high-water mark (``Leaf.history``). ``Q`` is estimated from the
conversation's category, or is a constant as in the paper's experiments.

Forced or optional caching: in the paper's forced model a served conversation is cached whole, as in
a server, whose KV is in memory when a request ends. In the optional model a cache may decline:
``caching: "optional"`` returns no victim for tokens that the request's next prompt does not need,
so that they stay uncached if only needed tokens are cached. This is for the simulator, which then
keeps the head of the path. A server has to run the request and cannot decline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from sglang_canopy import declared
from sglang_canopy.declared import declare_key
from sglang_canopy.policy.base import Policy, Victim
from sglang_canopy.policy.structures.cells import LEAF, TIME_S, EndQueue, HeapEntry
from sglang_canopy.policy.structures.reranking import Reranking
from sglang_canopy.policy.tail_target import TailTarget, check_target
from sglang_canopy.records import Leaf, Request
from sglang_canopy.reuse.learner import ReuseModel, mean_growth_tokens


@dataclass(frozen=True, slots=True)
class Config:
    """Options of ``canopy-tlru``."""

    ttft_ms: float | None = declare_key(
        None, "Target TTFT in milliseconds; plain LRU until requests carry a TTFT model.", low=1e-3
    )
    ttft_percentile: float | None = declare_key(
        None, "Or: the target is this percentile of the observed requests.", low=0.01, high=99.99
    )
    threshold_tokens: float | None = declare_key(
        None, "Or: tokens that may be left to prefill (simulator).", low=0
    )
    next_prompt_tokens: float | None = declare_key(
        None,
        "Plan for this many new tokens of the next prompt (the paper's fixed estimate of Q); null: "
        "for their mean by category.",
        low=0,
    )
    caching: str = declare_key(
        "forced",
        "``optional`` (simulator only): needed tokens never make room for free ones.",
        choices=("forced", "optional"),
    )

    def __post_init__(self) -> None:
        declared.check(self)
        check_target(self)


class _Rank(NamedTuple):
    """``Leaf.rank_state`` of this policy."""

    queue: EndQueue
    entry: HeapEntry
    keep_tokens: int


class TailOptimizedLRU(Policy):
    """T-LRU. Choosing a victim is O(log n) amortised."""

    name: ClassVar[str] = "canopy-tlru"
    Config: ClassVar[type] = Config
    takes_tail_target: ClassVar[bool] = True
    learns: bool = True

    def __init__(self, config: Any, model: ReuseModel | None = None) -> None:
        """``model``: learnt state to share; by default a new one."""
        super().__init__(config)
        self.model = ReuseModel(uses_own_gaps=False) if model is None else model
        self.target = TailTarget(config.ttft_ms, config.ttft_percentile, config.threshold_tokens)
        self._ranked_version = self._plan_version()
        self._reranking = Reranking()
        self._allowance_tokens = 0
        """Tokens that the current request may still evict from others (optional caching)."""
        self._free_queue = EndQueue()
        self._needed_queue = EndQueue()

    def arrive(self, request: Request) -> str:
        return self.model.arrive(request) if self.learns else super().arrive(request)

    def finish(self, request: Request) -> str:
        if not self.learns:
            return super().finish(request)
        label = self.model.finish(request)
        self.target.observe(request)
        if self.config.caching == "optional":
            self._allowance_tokens = self._needed_uncached_tokens(label, request)
        return label

    def twin(self) -> Policy:
        """Return a policy for another tier, which shares this policy's learnt state."""
        twin = type(self)(self.config, self.model)
        twin.target, twin.learns = self.target, False
        return twin

    def admit(self, leaf: Leaf, now: float) -> None:
        keep_tokens = self._keep_tokens(leaf)
        queue = self._free_queue if keep_tokens < leaf.length else self._needed_queue
        leaf.rank_state = _Rank(queue, queue.push(leaf, leaf.last_access), keep_tokens)

    def drop(self, leaf: Leaf) -> None:
        if leaf.rank_state is not None:
            queue, entry, _ = leaf.rank_state
            leaf.rank_state = None
            queue.remove(entry)
            if self._reranking:
                self._reranking.discard(leaf)

    def put_back(self, leaf: Leaf, rank_state: Any, now: float) -> None:
        queue, entry, keep_tokens = rank_state
        leaf.rank_state = _Rank(queue, queue.push(leaf, entry[TIME_S]), keep_tokens)
        if self._reranking:
            self._reranking.put_back(leaf)

    # free(leaf) = the tokens of leaf beyond L + Q - xi; victim = free(the oldest leaf with free
    # tokens), else the oldest leaf
    def victim(self, now: float) -> Victim | None:
        if self._ranked_version != self._plan_version():
            self._ranked_version = self._plan_version()
            self._reranking.begin(self.leaves())
        if self._reranking:
            self._replan(now)
        entry = self._free_queue.oldest()
        if entry is not None:
            leaf = entry[LEAF]
            return Victim(leaf, leaf.rank_state.keep_tokens)
        entry = self._needed_queue.oldest()
        if entry is None:
            return None
        if self.config.caching == "forced":
            return Victim(entry[LEAF])
        if self._allowance_tokens <= 0:
            return None
        return Victim(entry[LEAF], max(0, entry[LEAF].length - self._allowance_tokens))

    def record_eviction(self, leaf: Leaf, tokens: int) -> None:
        self._allowance_tokens -= tokens

    def split(self, leaf: Leaf, head: Leaf) -> None:
        if leaf.rank_state is not None:
            self.drop(leaf)
            self.admit(leaf, leaf.last_access)

    def _keep_tokens(self, leaf: Leaf) -> int:
        """Return the tokens of ``leaf`` that the next prompt needs; all without a target."""
        threshold_tokens = self.target.leaf_threshold_tokens(leaf)
        if threshold_tokens is None:
            return leaf.length
        needed_tokens = leaf.history + self.next_tokens(leaf.category) - threshold_tokens
        return max(0, min(leaf.length, int(needed_tokens) - leaf.offset))

    def _needed_uncached_tokens(self, label: str, request: Request) -> int:
        """Return the uncached tokens of the request's path that its next prompt needs."""
        uncached_tokens = request.prompt_tokens - (request.cached_tokens or 0)
        threshold_tokens = self.target.threshold_tokens
        if threshold_tokens is None:
            return uncached_tokens
        path_tokens = request.prompt_tokens + request.output_tokens
        needed_tokens = int(path_tokens + self.next_tokens(label) - threshold_tokens)
        unneeded_tokens = request.prompt_tokens - needed_tokens
        return uncached_tokens - max(0, unneeded_tokens)

    def next_tokens(self, label: str) -> float:
        """Return the planned new tokens of the next prompt for this label."""
        if self.config.next_prompt_tokens is not None:
            return float(self.config.next_prompt_tokens)
        if not self.model.version:
            return self.model.early_growth_tokens()
        return mean_growth_tokens(self.model.categories.get(label))

    def _plan_version(self) -> tuple[int, int]:
        # Prompt growth changes fast at first: replan after the fits 1, 2, 4, 8, and every 16th.
        fit_count = self.model.version
        plan_number = fit_count.bit_length() if fit_count < 16 else 4 + fit_count // 16
        return self.target.rank_version, plan_number

    def _replan(self, now: float) -> None:
        for leaf in self._reranking.due_leaves(now):
            keep_tokens = self._keep_tokens(leaf)
            if (leaf.rank_state.queue is self._free_queue) == (keep_tokens < leaf.length):
                leaf.rank_state = leaf.rank_state._replace(keep_tokens=keep_tokens)
            else:
                self.drop(leaf)
                self.admit(leaf, now)

    def state(self) -> Mapping[str, Any]:
        return self.model.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.model.restore(state)

    def leaves(self) -> Iterator[Leaf]:
        yield from self._free_queue
        yield from self._needed_queue


POLICY = TailOptimizedLRU
