"""Simulate one policy at one capacity over one trace."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from canopy_lab.sim.requests import SimulatedHints, to_requests
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.block_tree import RadixTree, TreeCut
from sglang_canopy.records import Request
from sglang_canopy.reuse.categories import Categories
from sglang_canopy.reuse.category import Category
from sglang_canopy.reuse.learner import ReuseModel

_POOL_REQUESTS = 10_000


class RandomCategories(Categories):
    """A table that categorises each request by the features of a random earlier request.

    The placebo of a policy that learns from labels. Shuffling the trace's own labels is too weak:
    the reuse model counts turns and new tokens from the paths.
    """

    def __init__(self, max_labels: int, seed: int) -> None:
        super().__init__(max_labels)
        self._random = random.Random(seed)
        self._feature_pool: list[tuple[str, ...]] = []

    def refine(
        self, names: tuple[str, ...], tenant: str | None = None, now: float | None = None
    ) -> Category:
        if len(self._feature_pool) < _POOL_REQUESTS:
            self._feature_pool.append(names)
        else:
            self._feature_pool[self._random.randrange(_POOL_REQUESTS)] = names
        return super().refine(self._random.choice(self._feature_pool), tenant, now)


def randomise_categories(policy: Policy, seed: int) -> bool:
    """Give a new policy random categories. Return whether it has a reuse model to change."""
    model = getattr(policy, "model", None)
    if not isinstance(model, ReuseModel):
        return False
    model.categories = RandomCategories(model.categories.max_labels, seed)
    return True


@dataclass(frozen=True, slots=True)
class SimResult:
    """Result of one run. Hits are blocks of the longest cached prefix."""

    requests: int
    capacity_blocks: int
    blocks: int
    block_hits: int
    tokens: int
    token_hits: int
    uncached_tokens_p50: float
    uncached_tokens_p90: float
    uncached_tokens_p95: float
    uncached_tokens_p99: float
    uncached_tokens: array
    """Tokens to prefill per request, in order (``array('q')``)."""
    threshold_tokens: float | None
    tel_tokens: float | None
    """Tail excess latency in tokens: the sum over requests of max(0, uncached - threshold)
    (arXiv 2510.15152 with its linear latency model; times alpha it is the paper's TEL in
    seconds). ``None`` without a threshold."""
    slo_violations: int | None
    """Requests with more uncached tokens than the threshold."""
    evictions: int
    evicted_blocks: int
    seconds: float
    """Wall time of the run, including reading the trace."""

    @property
    def block_hit_ratio(self) -> float:
        return self.block_hits / self.blocks if self.blocks else 0.0

    @property
    def token_hit_ratio(self) -> float:
        return self.token_hits / self.tokens if self.tokens else 0.0


def simulate(
    trace: Iterable[TraceRequest],
    policy: Policy,
    capacity_blocks: int,
    *,
    threshold_tokens: float | None = None,
    placebo_seed: int | None = None,
    hints: SimulatedHints | None = None,
    quantum_tokens: int = 1,
    whole_nodes: bool = False,
    optional_caching: bool = False,
    on_evict: Callable[[TreeCut], None] | None = None,
    on_request: Callable[[Request, int], None] | None = None,
) -> SimResult:
    """Serve ``trace`` in order from an empty cache of ``capacity_blocks``.

    ``placebo_seed`` gives ``policy``, which must be new, another request's labels
    (``randomise_categories``); a policy without a reuse model gets the trace's labels shuffled.
    The result's tail is measured against ``threshold_tokens``. With ``optional_caching`` a request
    need not be cached (``policy/block_tree.py``). ``on_request(request, hit_tokens)`` is called after
    each request.

    Raises ``CanopyError`` for an empty or unsorted trace, or for mixed block sizes.
    """
    start_s = time.perf_counter()
    tree: RadixTree | None = None
    blocks = block_hits = tokens = token_hits = 0
    uncached = array("q")
    shuffle_seed = placebo_seed
    if placebo_seed is not None and randomise_categories(policy, placebo_seed):
        shuffle_seed = None
    for request in to_requests(trace, shuffle_seed=shuffle_seed, hints=hints):
        if tree is None:
            tree = RadixTree(
                policy,
                capacity_blocks,
                request.block_tokens,
                quantum_tokens=quantum_tokens,
                whole_nodes=whole_nodes,
                optional_caching=optional_caching,
                on_evict=on_evict,
            )
        elif request.block_tokens != tree.block_tokens:
            raise CanopyError(
                f"request {len(uncached) + 1} has blocks of {request.block_tokens} tokens, the "
                f"ones before of {tree.block_tokens}; simulate traces of one block size"
            )
        hit_blocks = tree.access(request)
        prompt = request.prompt_tokens
        hit_tokens = min(hit_blocks * tree.block_tokens, prompt)
        blocks += len(request.path)
        block_hits += hit_blocks
        tokens += prompt
        token_hits += hit_tokens
        uncached.append(prompt - hit_tokens)
        if on_request is not None:
            on_request(request, hit_tokens)
    if tree is None:
        raise CanopyError("the trace has no requests; give a trace with requests")
    uncached_tokens = np.frombuffer(uncached, dtype=np.int64)
    p50, p90, p95, p99 = (float(p) for p in np.percentile(uncached_tokens, (50, 90, 95, 99)))
    tel_tokens, violations = None, None
    if threshold_tokens is not None:
        excess = uncached_tokens[uncached_tokens > threshold_tokens] - threshold_tokens
        tel_tokens, violations = float(excess.sum()), int(excess.size)
    return SimResult(
        requests=len(uncached),
        capacity_blocks=capacity_blocks,
        blocks=blocks,
        block_hits=block_hits,
        tokens=tokens,
        token_hits=token_hits,
        uncached_tokens_p50=p50,
        uncached_tokens_p90=p90,
        uncached_tokens_p95=p95,
        uncached_tokens_p99=p99,
        uncached_tokens=uncached,
        threshold_tokens=threshold_tokens,
        tel_tokens=tel_tokens,
        slo_violations=violations,
        evictions=tree.eviction_count,
        evicted_blocks=tree.evicted_blocks,
        seconds=time.perf_counter() - start_s,
    )


def distinct_blocks(trace: Iterable[TraceRequest]) -> int:
    seen: set[int] = set()
    for record in trace:
        seen.update(record.blocks)
    return len(seen)
