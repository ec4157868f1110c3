"""Simulated cache of sampled blocks, to estimate the hits of another policy on live requests."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.block_tree import Node, RadixTree
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
        self._tokens = capacity_tokens
        self._block_tokens = block_tokens
        self._whole_nodes = whole_nodes
        self.tree = self._empty(policy, one_in)
        self._evicted_before = False

    @property
    def has_evicted(self) -> bool:
        return self._evicted_before or self.tree.evictions > 0

    @property
    def capacity_blocks(self) -> int:
        return self.tree.capacity_blocks

    def access(self, request: Request) -> int:
        """Serve a finished request with a sampled path; return the leading blocks that hit."""
        tree = self.tree
        if request.time > tree.now:
            tree.now = request.time
        node, hit = tree.match(request.path)
        tree.keep(request, node, hit)
        return hit

    def thin_out(self, policy: Policy, one_in: int, sampled: Callable[[int], bool]) -> None:
        """Keep only the ``sampled`` blocks, one in ``one_in``, in their order of use.

        ``policy``: a fresh policy of the same kind, to rank from now on.
        """
        self._evicted_before = self.has_evicted
        old, self.tree = self.tree, self._empty(policy, one_in)
        tree = self.tree
        tree.now = old.now
        placed: dict[Node, Node] = {old.root: tree.root}
        for node in old.nodes():
            assert node.parent is not None, "the root is not among its nodes"
            parent = placed[node.parent]
            blocks = tuple(block for block in node.blocks if sampled(block))
            if not blocks:
                placed[node] = parent  # attach its children to the parent
                continue
            offset = parent.offset + parent.length
            new = Node(parent, blocks, offset, len(blocks) * tree.block_tokens)
            new.inherit(node)
            parent.children[blocks[0]] = new
            placed[node] = new
            tree.used_blocks += len(blocks)
        leaves = [node for node in tree.nodes() if not node.children]
        for leaf in sorted(leaves, key=lambda leaf: (leaf.last_access, leaf.blocks[0])):
            policy.admit(leaf, tree.now)
        if tree.used_blocks > tree.capacity_blocks:
            tree.evict(tree.used_blocks - tree.capacity_blocks)

    def __len__(self) -> int:
        """Return the number of sampled blocks held."""
        return self.tree.used_blocks

    def _empty(self, policy: Policy, one_in: int) -> RadixTree:
        block_tokens = self._block_tokens * one_in
        capacity = max(1, self._tokens // block_tokens)
        return RadixTree(policy, capacity, block_tokens, whole_nodes=self._whole_nodes)


def as_sampled(request: Request, conversation: Hashable) -> Request:
    """Copy ``request`` for shadow caches, with its inferred conversation and without keep hints."""
    return request.copy(path=tuple(request.path), conversation=conversation, keep_until=None)
