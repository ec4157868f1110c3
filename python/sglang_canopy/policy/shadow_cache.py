"""A small cache that was never there: what another ranking would have hit on the same requests."""

from __future__ import annotations

from collections.abc import Hashable

from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.block_tree import Node, RadixTree
from sglang_canopy.records import Leaf, Request


class SampledTree(RadixTree):
    """A tree that serves one conversation in ``one_in``, in a capacity smaller by as much.

    What several conversations share takes as much room for a sample of them as for all, so a
    shared block counts ``1 / one_in`` of a block: the room for it is lent.
    """

    def __init__(
        self,
        policy: Policy,
        capacity_tokens: int,
        block_tokens: int,
        one_in: int,
        whole_nodes: bool = False,
    ) -> None:
        self._tokens = capacity_tokens
        self._one_in = one_in
        self.shared_blocks = 0
        super().__init__(
            policy,
            max(1, capacity_tokens // one_in // block_tokens),
            block_tokens,
            whole_nodes=whole_nodes,
        )

    def thin_out(self, one_in: int) -> None:
        """From now on one conversation in ``one_in`` is served."""
        self._one_in = one_in
        self._lend()
        if self.used_blocks > self.capacity_blocks:
            self.evict(self.used_blocks - self.capacity_blocks)

    def stamp(self, request: Request, leaf: Node) -> None:
        own = []
        node: Node | None = leaf
        while node is not None and node is not self.root:
            if not node.shared:
                own.append(node)
            node = node.parent
        super().stamp(request, leaf)
        new = sum(len(node.blocks) for node in own if node.shared)
        if new:
            self.shared_blocks += new
            self._lend()

    def _cut(self, leaf: Leaf, keep_tokens: int, need: int) -> int:
        gone = super()._cut(leaf, keep_tokens, need)  # type: ignore[arg-type]
        if leaf.shared:
            self.shared_blocks -= gone
            self._lend()
        return gone

    def _lend(self) -> None:
        base = self._tokens // self._one_in // self.block_tokens
        lent = self.shared_blocks - self.shared_blocks // self._one_in
        self.capacity_blocks = max(1, base + lent)


class ShadowCache:
    """A tree of block ids under ``policy``, fed with a sample of the live cache's requests.

    ``capacity_tokens``: of the real cache. Nothing is learnt here: requests carry the labels that
    somebody else gave them.
    """

    def __init__(
        self,
        policy: Policy,
        capacity_tokens: int,
        block_tokens: int,
        one_in: int = 1,
        whole_nodes: bool = False,
    ) -> None:
        self.tree = SampledTree(policy, capacity_tokens, block_tokens, one_in, whole_nodes)

    def access(self, request: Request) -> int:
        """Serve a request that has ended; returns the prompt tokens that were here."""
        tree = self.tree
        if request.time > tree.now:
            tree.now = request.time
        node, hit = tree.match(request.path)
        tree.keep(request, node, hit)
        return min(hit * tree.block_tokens, request.prompt_tokens)

    def __len__(self) -> int:
        """Blocks held."""
        return self.tree.used_blocks


def as_sampled(request: Request, conversation: Hashable) -> Request:
    """``request`` for shadow caches: a copy that names its conversation, which asks to keep nothing."""
    return Request(
        time=request.time,
        category=request.category,
        path=tuple(request.path),
        block_tokens=request.block_tokens,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        turn=request.turn,
        conversation=conversation,
        stop=request.stop,
        tenant=request.tenant,
        slo_ms=request.slo_ms,
        over=request.over,
        return_in_s=request.return_in_s,
        source=request.source,
        ttft_model=request.ttft_model,
        cached_tokens=request.cached_tokens,
        label=request.label,
    )
