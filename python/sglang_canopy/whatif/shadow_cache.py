"""Simulated cache of sampled blocks, to estimate the hits of another policy on live requests."""

from __future__ import annotations

from collections.abc import Hashable

from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.records import Request


class ShadowCache:
    """Tree of block ids under ``policy``, fed with sampled blocks of live requests.

    ``capacity_tokens``: size of the modelled cache. Each sampled block represents ``one_in`` blocks
    and counts ``one_in * block_tokens`` tokens, so capacity, lengths and offsets match the modelled
    cache (SHARDS, Waldspurger et al., FAST 2015, scales the capacity instead). The cache does not
    learn: requests arrive with labels from the meter.
    """

    def __init__(
        self,
        policy: Policy,
        capacity_tokens: int,
        block_tokens: int,
        one_in: int = 1,
        whole_nodes: bool = False,
    ) -> None:
        block_tokens *= one_in
        capacity = max(1, capacity_tokens // block_tokens)
        self.tree = RadixTree(policy, capacity, block_tokens, whole_nodes=whole_nodes)

    @property
    def has_evicted(self) -> bool:
        return self.tree.evictions > 0

    @property
    def capacity_blocks(self) -> int:
        return self.tree.capacity_blocks

    def access(self, request: Request) -> int:
        """Serve a finished request with a sampled path; return the leading blocks that hit."""
        tree = self.tree
        if request.time > tree.now:
            tree.now = request.time
        node, hit = tree.match(request.path)
        tree.cache_path(request, node, hit)
        return hit

    def __len__(self) -> int:
        """Return the number of sampled blocks held."""
        return self.tree.used_blocks


def as_sampled(request: Request, conversation: Hashable) -> Request:
    """Copy ``request`` for shadow caches, with its inferred conversation and without keep hints."""
    return request.copy(path=tuple(request.path), conversation=conversation, keep_until=None)
