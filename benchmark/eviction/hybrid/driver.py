"""Simulate one order of states over one trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from canopy_lab.sim.requests import to_requests
from canopy_lab.trace.record import TraceRequest
from hybrid.marconi import MarconiTree
from hybrid.shape import HybridShape
from hybrid.tree import HybridTree
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.states import StatePolicy
from sglang_canopy.records import Request

STATE_SHARE = 0.9
"""Bytes of states for each byte of KV, as SGLang splits memory (``mamba_full_memory_ratio``)."""


@dataclass(frozen=True, slots=True)
class HybridResult:
    """Result of one run. A hit ends at a state."""

    requests: int
    tokens: int
    token_hits: int
    flops: int
    """Cost of prefilling every prompt without a cache."""
    flops_saved: int
    states_evicted: int

    @property
    def token_hit_ratio(self) -> float:
        return self.token_hits / self.tokens if self.tokens else 0.0

    @property
    def flops_saved_ratio(self) -> float:
        return self.flops_saved / self.flops if self.flops else 0.0

    def recompute_s(self, flops_per_s: float) -> float:
        """Seconds of prefill that were left, at a rate."""
        return (self.flops - self.flops_saved) / flops_per_s


def split_memory(
    shape: HybridShape, capacity_bytes: int, block_tokens: int, share: float = STATE_SHARE
) -> tuple[int, int]:
    """Return the blocks of KV and slots of states in ``capacity_bytes``, with ``share`` bytes of states
    per byte of KV. Raises ``CanopyError`` if either is 0."""
    kv_bytes = capacity_bytes / (1.0 + share)
    blocks = int(kv_bytes // (shape.kv_bytes_per_token * block_tokens))
    slots = int((capacity_bytes - kv_bytes) // shape.state_bytes)
    if blocks < 1 or slots < 1:
        raise CanopyError(
            f"{capacity_bytes} bytes hold {blocks} blocks and {slots} states; give more"
        )
    return blocks, slots


def simulate_split(
    trace: Iterable[TraceRequest],
    policy: Policy,
    states: StatePolicy,
    shape: HybridShape,
    capacity_bytes: int,
    *,
    share: float = STATE_SHARE,
    unusable_first: bool = True,
    verify_every: int = 0,
) -> HybridResult:
    """Pools of their own for KV and states, as SGLang has them."""

    def build(block_tokens: int) -> HybridTree:
        blocks, slots = split_memory(shape, capacity_bytes, block_tokens, share)
        return HybridTree(
            policy,
            states,
            blocks,
            slots,
            block_tokens,
            cost=lambda tokens: shape.prefill_flops(tokens) / 1e9,
            unusable_first=unusable_first,
        )

    return _run(trace, build, shape, verify_every)


def simulate_marconi(
    trace: Iterable[TraceRequest],
    shape: HybridShape,
    capacity_bytes: int,
    alpha: float,
    *,
    verify_every: int = 0,
) -> HybridResult:
    """One budget for KV and states, as in Marconi."""
    return _run(
        trace,
        lambda block_tokens: MarconiTree(shape, capacity_bytes, block_tokens, alpha),
        shape,
        verify_every,
    )


def _run(
    trace: Iterable[TraceRequest],
    build: Callable[[int], HybridTree | MarconiTree],
    shape: HybridShape,
    verify_every: int,
) -> HybridResult:
    tree: HybridTree | MarconiTree | None = None
    requests = tokens = hits = flops = saved = 0
    for request in to_requests(trace):
        if tree is None:
            tree = build(request.block_tokens)
        hit = tree.access(_whole_blocks(request)) * request.block_tokens
        requests += 1
        tokens += request.prompt_tokens
        hits += hit
        flops += shape.prefill_flops(request.prompt_tokens)
        saved += shape.prefill_flops(hit)
        if verify_every and requests % verify_every == 0:
            tree.verify()
    if tree is None:
        raise CanopyError("the trace has no requests; give one that has")
    return HybridResult(requests, tokens, hits, flops, saved, tree.states_evicted)


def _whole_blocks(request: Request) -> Request:
    """A state is at a whole block's end; every arm computes the rest of the prompt."""
    full = request.prompt_tokens // request.block_tokens
    return replace(request, path=tuple(request.path[:full]))
