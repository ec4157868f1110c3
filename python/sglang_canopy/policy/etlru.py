"""``etlru``: expected-tail LRU, WA's return rank times a tail term.

    rank = G_w(a) * (eps + (1 - eps) * P_w(Q > xi - L + d))

A leaf's last token at depth ``d`` affects the tail only if the next prompt, of L + Q tokens, would
exceed the threshold ``xi`` without it (arXiv 2510.15152, ET-LRU). ``eps`` keeps part of the rank
for plain hits. With threshold 0 the tail term is 1 and the rank is WA's.

Unlike WA's rank, this rank also depends on depth and history within a category. Each category's
leaves are therefore kept in buckets of xi - L + d (by factors of the square root of two), and a
victim is trimmed only to the end of its bucket.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

from sglang_canopy.declared import declare_key
from sglang_canopy.policy import wa
from sglang_canopy.policy.base import Policy, Victim
from sglang_canopy.policy.structures.reranking import Reranking
from sglang_canopy.policy.tail_target import TailTarget, check_target
from sglang_canopy.records import Leaf, Request
from sglang_canopy.reuse.category import Category
from sglang_canopy.reuse.learner import ReuseModel
from sglang_canopy.reuse.survival import TOKEN_BINS, TOKEN_EDGES, token_bin

_NO_TARGET_BUCKET = -1


@dataclass(frozen=True, slots=True)
class Config(wa.Config):
    """Options of ``etlru``: those of ``wa``, a tail target and eps."""

    ttft_ms: float | None = declare_key(
        None, "Target TTFT in milliseconds; as ``wa`` until requests carry a TTFT model.", low=1e-3
    )
    ttft_percentile: float | None = declare_key(
        None, "Or: the target is this percentile of the observed requests.", low=0.01, high=99.99
    )
    threshold_tokens: float | None = declare_key(
        None, "Or: tokens that may be left to prefill (simulator).", low=0
    )
    floor: float = declare_key(
        0.3, "eps, the share of the rank that does not depend on the tail.", low=0, high=1
    )

    def __post_init__(self) -> None:
        wa.Config.__post_init__(self)
        check_target(self)


class ExpectedTailLRU(wa.WorkloadAware):
    """ET-LRU over cells of equal category and equal tokens to the threshold."""

    name: ClassVar[str] = "etlru"
    Config: ClassVar[type] = Config
    takes_tail_target: ClassVar[bool] = True

    def __init__(self, config: Any, model: ReuseModel | None = None) -> None:
        super().__init__(config, model)
        self.target = TailTarget(config.ttft_ms, config.ttft_percentile, config.threshold_tokens)
        self._target_version = 0
        self._reranking = Reranking()

    def finish(self, request: Request) -> str:
        label = super().finish(request)
        if self.learns:
            self.target.observe(request)
        return label

    def twin(self) -> Policy:
        twin = super().twin()
        assert isinstance(twin, ExpectedTailLRU)
        twin.target = self.target
        return twin

    def drop(self, leaf: Leaf) -> None:
        super().drop(leaf)
        if self._reranking:
            self._reranking.discard(leaf)

    def put_back(self, leaf: Leaf, rank_state: Any, now: float) -> None:
        super().put_back(leaf, rank_state, now)
        if self._reranking:
            self._reranking.put_back(leaf)

    # rank(leaf) = wa's rank * (eps + (1 - eps) * P(next turn adds > threshold - history + depth))
    # victim = the leaf of least rank, trimmed to the point at which the last factor changes
    def victim(self, now: float) -> Victim | None:
        if self._target_version != self.target.rank_version:
            self._target_version = self.target.rank_version
            self._reranking.begin(self.leaves())
        if self._reranking:
            for leaf in self._reranking.due_leaves(now):
                self._readmit(leaf, now)
        return super().victim(now)

    def _slack_tokens(self, leaf: Leaf) -> float | None:
        """Return xi - L + d: tokens that the next prompt may add before the last token matters."""
        threshold_tokens = self.target.leaf_threshold_tokens(leaf)
        if threshold_tokens is None:
            return None
        return threshold_tokens - leaf.history + leaf.offset + leaf.length

    def _bucket(self, leaf: Leaf, category: Category) -> Hashable:
        slack_tokens = self._slack_tokens(leaf)
        return _NO_TARGET_BUCKET if slack_tokens is None else token_bin(slack_tokens)

    def _weight(self, category: Category, bucket: Any) -> float:
        if bucket == _NO_TARGET_BUCKET:
            return 1.0
        tail_chance = category.growth_exceedance[bucket] if bucket > 0 else 1.0
        eps: float = self.config.floor
        return eps + (1.0 - eps) * tail_chance

    def _keep_tokens(self, leaf: Leaf) -> int:
        slack_tokens = self._slack_tokens(leaf)
        if slack_tokens is None or not 0 < token_bin(slack_tokens) < TOKEN_BINS:
            return 0
        excess_tokens = slack_tokens - TOKEN_EDGES[token_bin(slack_tokens)]
        return max(0, leaf.length - max(1, int(excess_tokens) + 1))


POLICY = ExpectedTailLRU
