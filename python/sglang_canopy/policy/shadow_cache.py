"""A small cache that was never there: what another ranking would have hit on the same requests."""

from __future__ import annotations

from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.records import Request


class ShadowCache:
    """A tree of block ids under ``policy``, fed with a sample of the live cache's requests.

    Nothing is learnt here: requests carry the labels that the live policy gave them.
    """

    def __init__(self, policy: Policy, capacity_tokens: int, block_tokens: int) -> None:
        blocks = max(1, capacity_tokens // block_tokens)
        self._tree = RadixTree(policy, blocks, block_tokens)

    def access(self, request: Request) -> int:
        """Serve a request that has ended; returns the prompt tokens that were here."""
        tree = self._tree
        if request.time > tree.now:
            tree.now = request.time
        node, hit = tree.match(request.path)
        tree.keep(request, node, hit)
        return min(hit * tree.block_tokens, request.prompt_tokens)

    def __len__(self) -> int:
        """Blocks held."""
        return self._tree.used_blocks
