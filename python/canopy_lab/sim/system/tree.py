"""One instance's radix tree over device and host memory, as HiCache keeps it.

What goes in, down, up and out (``nodes.py`` has what is where). Eviction is by need: a victim's
tail is cut only as far as room is needed.
"""

from __future__ import annotations

from typing import Any

from canopy_lab.sim.system.expiry import Expiry
from canopy_lab.sim.system.nodes import DEVICE, HOST, NOWHERE, TierNode, TierNodes
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.cut import QUANTUM_TOKENS, tokens_kept
from sglang_canopy.records import Leaf, Request


class TieredTree(TierNodes):
    """Device and host of one instance. Capacities in tokens; the host's may be 0."""

    def __init__(
        self,
        device_policy: Policy,
        device_tokens: int,
        block_tokens: int,
        *,
        host_policy: Policy | None = None,
        host_tokens: int = 0,
        host_expiry: Expiry | None = None,
        write_back: bool = False,
        whole_nodes: bool = False,
        quantum_tokens: int = QUANTUM_TOKENS,
    ) -> None:
        super().__init__(
            device_policy,
            device_tokens,
            block_tokens,
            host_policy,
            host_tokens,
            host_expiry,
        )
        self.write_back = write_back
        self.whole_nodes = whole_nodes
        self.quantum_tokens = quantum_tokens
        self.host_written = 0
        """Tokens copied to the host so far."""
        self.duplicates: dict[TierNode, None] = {}
        """Under ``write_back``: every node on both tiers, and some that no longer are."""
        self.demoted: list[TierNode] = []
        """Nodes that ``write_back`` copied to the host, until somebody clears the list."""
        self.pins_demoted = False
        """Whether they are pinned, until somebody unpins them."""

    def claim(self, tokens: int) -> None:
        """Take device tokens for a running request, evicting for them."""
        short = tokens - self.free
        if short > 0:
            self.evict_device(short)
        self.private += tokens

    # ---- growing ----

    def insert(
        self, path: tuple[int, ...], blocks: int, tokens: int, since: TierNode | None = None
    ) -> tuple[TierNode, int]:
        """Add the first ``blocks`` of ``path``, ``tokens`` in all, out of the private tokens.

        ``since`` as in ``match``. Returns the last node, unlocked still, and how many tokens
        became the tree's. What is cached already stays as it is; what was on the host alone is on
        the device again.
        """
        found = self.match(path, since, blocks)
        node, added = found.node, 0
        above = node
        while not above.device:
            above.device = True
            if self.write_back:
                self.duplicates[above] = None
            above.parent.device_children += 1
            added += above.length
            if not above.locks:
                self.evictable += above.length
            if above.ranked:
                self._unrank(above)
            above = above.parent
        if node is not self.root:
            self._reconsider(above)
            missing = min(found.blocks * self.block_tokens, tokens) - found.tokens
            if missing > 0:
                if node.host and self._host_room(missing) and node.host:
                    self.host_used += missing
                elif node.host:
                    self._free_host(node)
                added += missing
                node.length += missing
                if not node.locks:
                    self.evictable += missing
        if found.blocks < blocks and tokens > found.blocks * self.block_tokens:
            offset = found.blocks * self.block_tokens
            leaf = TierNode(node, path[found.blocks : blocks], offset, tokens - offset)
            leaf.device = True
            if self.expiry is not None:
                leaf.group = self.expiry.group(path[:blocks])
            node.children[path[found.blocks]] = leaf
            node.device_children += 1
            if node.ranked:
                self._unrank(node)
            self.evictable += leaf.length
            added += leaf.length
            node = leaf
        self.device_used += added
        self.private -= added
        return node, added

    def load(self, node: TierNode) -> int:
        """Bring the path to ``node`` from the host to the device; returns tokens.

        The caller has made room. Nodes on the way are locked by the caller.
        """
        loaded = 0
        while not node.device:
            node.device = True
            if self.write_back:
                self.duplicates[node] = None
            node.parent.device_children += 1
            loaded += node.length
            if not node.locks:
                self.evictable += node.length
            node = node.parent
        self.device_used += loaded
        return loaded

    def back_up(self, node: TierNode) -> int:
        """Copy ``node``, its ancestors first, to the host; returns tokens."""
        if self.host_policy is None:
            return 0
        chain = []
        while node is not self.root and not node.host:
            chain.append(node)
            node = node.parent
        copied = 0
        for node in reversed(chain):
            if not self._host_room(node.length):
                break
            node.host = True
            if self.write_back:
                self.duplicates[node] = None
            self.host_used += node.length
            copied += node.length
        self.host_written += copied
        return copied

    def add_to_host(self, path: tuple[int, ...], since: int, blocks: int, like: Leaf | None) -> int:
        """Blocks ``since`` to ``blocks`` of ``path`` came from storage to the host.

        Returns the tokens added; their room was claimed before with ``claim_host``. Nothing is
        added where what is before them has gone. ``like`` gives a new node its attributes.
        """
        found = self.match(path, None, blocks)
        node, size = found.node, self.block_tokens
        if not since <= found.blocks < blocks or (node is not self.root and not node.host):
            return 0
        if found.tokens < found.blocks * size:
            return 0  # a partial block in the way
        offset = found.blocks * size
        leaf = TierNode(node, path[found.blocks : blocks], offset, blocks * size - offset)
        leaf.host = True
        if like is not None:
            leaf.inherit(like)
        elif node.hits:
            leaf.inherit(node)
        if self.expiry is not None:
            leaf.group = self.expiry.group(path[:blocks])
        node.children[path[found.blocks]] = leaf
        if node.ranked == HOST:
            self._unrank(node)
        self.host_used += leaf.length
        self._reconsider(leaf)
        return leaf.length

    def claim_host(self, tokens: int) -> int:
        """Make room on the host for up to ``tokens``; returns how many there is room for."""
        self._host_room(tokens)
        return max(0, min(tokens, self.host_tokens - self.host_used))

    def stamp(self, node: TierNode, request: Request, number: int) -> None:
        """Mark every node up to the root, all locked, as used by request ``number``, once each."""
        while node is not self.root:
            if node.awaited_until is not None:
                self.awaited.served(node)
            if node.served == number:
                node.refresh(request)
            else:
                node.stamp(request)
                node.served = number
            node = node.parent

    # ---- eviction ----

    def evict_device(self, need: int) -> int:
        """Free at least ``need`` device tokens if there are victims; returns tokens freed."""
        freed = 0
        policy, size = self.device_policy, self.block_tokens
        while freed < need:
            victim = policy.victim(self.now)
            if victim is None:
                break
            node: TierNode = victim.leaf  # type: ignore[assignment]
            kept = self._kept(node, victim.keep, need - freed)
            gone = node.length - kept * size
            if self.write_back and not node.host:
                if kept:
                    self._split(node, kept)
                    kept = 0
                self._copy_down(node)
            freed += gone
            self.device_used -= gone
            self.evictable -= gone
            node.ranked = NOWHERE
            policy.drop(node)
            policy.evicted(node, gone)
            if kept and (self._hand_down(node, kept) if node.host else self._shorten(node, kept)):
                node.ranked = DEVICE
                policy.admit(node, self.now)
                continue
            if kept:
                self._split(node, kept)
            parent = node.parent
            node.device = False
            parent.device_children -= 1
            if node.host:
                self._reconsider(node)
            else:
                self._delete(node)
            self._reconsider(parent)
        return freed

    def evict_host(self, need: int) -> int:
        """The same on the host."""
        freed, policy = 0, self.host_policy
        while freed < need and policy is not None:
            victim = policy.victim(self.now)
            if victim is None:
                break
            node: TierNode = victim.leaf  # type: ignore[assignment]
            kept = self._kept(node, victim.keep, need - freed)
            gone = node.length - kept * self.block_tokens
            freed += gone
            node.ranked = NOWHERE
            policy.drop(node)
            policy.evicted(node, gone)
            if kept:
                self.host_used -= gone
                self._shorten(node, kept)
                node.ranked = HOST
                policy.admit(node, self.now)
                continue
            parent = node.parent
            self._delete(node)
            self._reconsider(parent)
        return freed

    def expire(self) -> int:
        """Drop what is on the host alone and past its time, tails first; returns tokens."""
        if self.expiry is None or self.host_policy is None:
            return 0
        gone = 0
        old = [leaf for leaf in self.host_policy.leaves() if self.expiry.over(leaf, self.now)]
        for leaf in old:
            node: Any = leaf
            while node.ranked == HOST and self.expiry.over(node, self.now):
                gone += node.length
                parent = node.parent
                self._unrank(node)
                self._delete(node)
                self._reconsider(parent)
                node = parent
        return gone

    # ---- private ----

    def _host_room(self, tokens: int) -> bool:
        short = tokens - (self.host_tokens - self.host_used)
        if short > 0 and self.write_back:
            short -= self._give_up_copies(short)
        return short <= 0 or self.evict_host(short) >= short

    def _give_up_copies(self, need: int) -> int:
        """Drop host copies of what the device has, in any order; returns tokens (SGLang's
        ``_reclaim_full_host_duplicates``)."""
        freed, gone = 0, []
        for node in self.duplicates:
            if freed >= need:
                break
            both = node.host and node.device and not node.pins and node.parent is not None
            gone.append(node)
            if both:
                self._free_host(node)
                freed += node.length
        for node in gone:
            del self.duplicates[node]
        return freed

    def _split(self, node: TierNode, at: int) -> TierNode:
        head = super()._split(node, at)
        if node in self.duplicates:
            self.duplicates[head] = None
        return head

    def _copy_down(self, node: TierNode) -> None:
        """``write_back``: copy a node to the host on its way out, if there is room."""
        if self._host_room(node.length):
            node.host = True
            self.host_used += node.length
            self.host_written += node.length
            self.demoted.append(node)
            if self.pins_demoted:
                self.pin(node)

    def _kept(self, node: TierNode, keep: int, need: int) -> int:
        """Blocks of a victim that stay: what the policy keeps and whatever else is not needed."""
        size = self.block_tokens
        kept = tokens_kept(
            node.length,
            keep,
            need,
            page=size,
            quantum=self.quantum_tokens,
            whole_nodes=self.whole_nodes,
        )
        return kept // size

    def _shorten(self, node: TierNode, kept: int) -> bool:
        """Forget all but the first blocks of a leaf."""
        if node.children:
            return False
        node.blocks = node.blocks[:kept]
        node.length = kept * self.block_tokens
        return True

    def _hand_down(self, node: TierNode, kept: int) -> bool:
        """Let a child on the host take over the end of ``node``, if it is what was cut before.

        Without it, evicting by need leaves a chain of small nodes on the host.
        """
        if len(node.children) != 1 or node.pins:
            return False
        (below,) = node.children.values()
        if (
            below.device
            or below.locks
            or below.hits != node.hits
            or below.last_access != node.last_access
            or below.category != node.category
        ):
            return False
        if below.ranked:
            self._unrank(below)
        tokens = kept * self.block_tokens
        del node.children[below.blocks[0]]
        below.blocks = node.blocks[kept:] + below.blocks
        below.offset -= node.length - tokens
        below.length += node.length - tokens
        node.blocks = node.blocks[:kept]
        node.length = tokens
        node.children[below.blocks[0]] = below
        self._reconsider(below)
        return True
