"""One instance's radix tree over device and host memory, as in HiCache.

Inserts, demotes, loads and evicts; ``nodes.py`` has the structure. Eviction is by need: a victim's
tail is cut only by the tokens needed.
"""

from __future__ import annotations

from typing import Any

from canopy_lab.sim.system.nodes import DEVICE, HOST, NO_TIER, TierNode, TierNodes
from canopy_lab.sim.system.tier_spec import Expiry
from sglang_canopy.policy.base import QUANTUM_TOKENS, Policy, tokens_kept
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
            device_policy, device_tokens, block_tokens, host_policy, host_tokens, host_expiry
        )
        self.write_back = write_back
        self.whole_nodes = whole_nodes
        self.quantum_tokens = quantum_tokens
        self.host_written_tokens = 0
        """Tokens copied to the host so far."""
        self.duplicates: dict[TierNode, None] = {}
        """Under ``write_back``: all nodes on both tiers, and some stale entries."""
        self.demoted: list[TierNode] = []
        """Nodes that ``write_back`` copied to the host; the caller clears the list."""
        self.retains_demoted = False
        """Lock the host copies of demoted nodes until the caller unlocks them."""

    def claim(self, tokens: int) -> None:
        """Allocate device tokens for a running request, evicting if needed."""
        missing_tokens = tokens - self.free_tokens
        if missing_tokens > 0:
            self.evict_device(missing_tokens)
        self.private_tokens += tokens

    # ---- insertion and loading ----

    def insert(
        self, path: tuple[int, ...], blocks: int, tokens: int, start: TierNode | None = None
    ) -> tuple[TierNode, int]:
        """Insert the first ``blocks`` of ``path``, ``tokens`` long, from the private tokens.

        ``start`` as in ``match``. Returns the last node, not locked, and the tokens added to the
        device. Host-only nodes on the path become device nodes too.
        """
        match = self.match(path, start, blocks)
        node, added_tokens = match.node, 0
        ancestor = node
        while not ancestor.on_device:
            ancestor.on_device = True
            if self.write_back:
                self.duplicates[ancestor] = None
            ancestor.parent.device_children += 1
            added_tokens += ancestor.length
            if not ancestor.locks:
                self.evictable_tokens += ancestor.length
            if ancestor.ranking_tier:
                self._unrank(ancestor)
            ancestor = ancestor.parent
        if node is not self.root:
            self._update_rank(ancestor)
            missing_tokens = min(match.blocks * self.block_tokens, tokens) - match.tokens
            if missing_tokens > 0:
                # Making room may drop the host copy of this node.
                if node.on_host and self._make_host_room(missing_tokens) and node.on_host:
                    self.host_used_tokens += missing_tokens
                elif node.on_host:
                    self._free_host(node)
                added_tokens += missing_tokens
                node.length += missing_tokens
                if not node.locks:
                    self.evictable_tokens += missing_tokens
        if match.blocks < blocks and tokens > match.blocks * self.block_tokens:
            offset = match.blocks * self.block_tokens
            leaf = TierNode(node, path[match.blocks : blocks], offset, tokens - offset)
            leaf.on_device = True
            if self.expiry is not None:
                leaf.group = self.expiry.group(path[:blocks])
            node.children[path[match.blocks]] = leaf
            node.device_children += 1
            if node.ranking_tier:
                self._unrank(node)
            self.evictable_tokens += leaf.length
            added_tokens += leaf.length
            node = leaf
        self.device_used_tokens += added_tokens
        self.private_tokens -= added_tokens
        return node, added_tokens

    def load(self, node: TierNode) -> int:
        """Load the path to ``node``, locked and with room, from the host; return the tokens."""
        loaded_tokens = 0
        while not node.on_device:
            node.on_device = True
            if self.write_back:
                self.duplicates[node] = None
            node.parent.device_children += 1
            loaded_tokens += node.length
            if not node.locks:
                self.evictable_tokens += node.length
            node = node.parent
        self.device_used_tokens += loaded_tokens
        return loaded_tokens

    def back_up(self, node: TierNode) -> int:
        """Copy ``node`` to the host, ancestors first; return the tokens copied."""
        if self.host_policy is None:
            return 0
        uncopied = []
        while node is not self.root and not node.on_host:
            uncopied.append(node)
            node = node.parent
        copied_tokens = 0
        for node in reversed(uncopied):
            if not self._make_host_room(node.length):
                break
            node.on_host = True
            if self.write_back:
                self.duplicates[node] = None
            self.host_used_tokens += node.length
            copied_tokens += node.length
        self.host_written_tokens += copied_tokens
        return copied_tokens

    def add_to_host(
        self, path: tuple[int, ...], first_block: int, end: int, template: Leaf | None
    ) -> int:
        """Add blocks ``first_block`` to ``end`` of ``path``, read from storage, to the host.

        Returns the tokens added; the caller has claimed their room with ``claim_host``. Adds
        nothing if their prefix was evicted. A new node copies its attributes from ``template``.
        """
        match = self.match(path, None, end)
        node, size = match.node, self.block_tokens
        if not first_block <= match.blocks < end or (node is not self.root and not node.on_host):
            return 0
        if match.tokens < match.blocks * size:
            return 0  # a partial block is in the way
        offset = match.blocks * size
        leaf = TierNode(node, path[match.blocks : end], offset, end * size - offset)
        leaf.on_host = True
        if template is not None:
            leaf.inherit(template)
        elif node.hits:
            leaf.inherit(node)
        if self.expiry is not None:
            leaf.group = self.expiry.group(path[:end])
        node.children[path[match.blocks]] = leaf
        if node.ranking_tier == HOST:
            self._unrank(node)
        self.host_used_tokens += leaf.length
        self._update_rank(leaf)
        return leaf.length

    def claim_host(self, tokens: int) -> int:
        """Make room on the host for up to ``tokens``; return the tokens that fit."""
        self._make_host_room(tokens)
        return max(0, min(tokens, self.host_tokens - self.host_used_tokens))

    def mark_used(self, node: TierNode, request: Request, number: int) -> None:
        """Mark all nodes from ``node`` (locked) to the root as used by request ``number``."""
        while node is not self.root:
            if node.awaited_until is not None:
                self.awaited.end_protection(node)
            if node.last_request == number:
                node.refresh(request)
            else:
                node.mark_used(request)
                node.last_request = number
            node = node.parent

    # ---- eviction ----

    def evict_device(self, needed_tokens: int) -> int:
        """Free at least ``needed_tokens`` device tokens if there are victims; returns tokens freed."""
        total_freed = 0
        policy, block_tokens = self.device_policy, self.block_tokens
        while total_freed < needed_tokens:
            victim = policy.victim(self.now)
            if victim is None:
                break
            node: TierNode = victim.leaf  # type: ignore[assignment]
            kept_blocks = self._kept_blocks(node, victim.keep_tokens, needed_tokens - total_freed)
            freed_tokens = node.length - kept_blocks * block_tokens
            if self.write_back and not node.on_host:
                if kept_blocks:
                    self._split(node, kept_blocks)
                    kept_blocks = 0
                self._copy_down(node)
            total_freed += freed_tokens
            self.device_used_tokens -= freed_tokens
            self.evictable_tokens -= freed_tokens
            node.ranking_tier = NO_TIER
            policy.drop(node)
            policy.record_eviction(node, freed_tokens)
            if kept_blocks and (
                self._hand_down(node, kept_blocks)
                if node.on_host
                else self._shorten(node, kept_blocks)
            ):
                node.ranking_tier = DEVICE
                policy.admit(node, self.now)
                continue
            if kept_blocks:
                self._split(node, kept_blocks)
            parent = node.parent
            node.on_device = False
            parent.device_children -= 1
            if node.on_host:
                self._update_rank(node)
            else:
                self._delete(node)
            self._update_rank(parent)
        return total_freed

    def evict_host(self, needed_tokens: int) -> int:
        total_freed, policy = 0, self.host_policy
        while total_freed < needed_tokens and policy is not None:
            victim = policy.victim(self.now)
            if victim is None:
                break
            node: TierNode = victim.leaf  # type: ignore[assignment]
            kept_blocks = self._kept_blocks(node, victim.keep_tokens, needed_tokens - total_freed)
            freed_tokens = node.length - kept_blocks * self.block_tokens
            total_freed += freed_tokens
            node.ranking_tier = NO_TIER
            policy.drop(node)
            policy.record_eviction(node, freed_tokens)
            if kept_blocks:
                self.host_used_tokens -= freed_tokens
                self._shorten(node, kept_blocks)
                node.ranking_tier = HOST
                policy.admit(node, self.now)
                continue
            parent = node.parent
            self._delete(node)
            self._update_rank(parent)
        return total_freed

    def expire(self) -> int:
        """Drop expired host-only nodes, tails first; return the tokens freed."""
        if self.expiry is None or self.host_policy is None:
            return 0
        freed_tokens = 0
        expired = [
            leaf for leaf in self.host_policy.leaves() if self.expiry.has_expired(leaf, self.now)
        ]
        for leaf in expired:
            node: Any = leaf
            while node.ranking_tier == HOST and self.expiry.has_expired(node, self.now):
                freed_tokens += node.length
                parent = node.parent
                self._unrank(node)
                self._delete(node)
                self._update_rank(parent)
                node = parent
        return freed_tokens

    # ---- private ----

    def _make_host_room(self, tokens: int) -> bool:
        missing_tokens = tokens - (self.host_tokens - self.host_used_tokens)
        if missing_tokens > 0 and self.write_back:
            missing_tokens -= self._drop_duplicates(missing_tokens)
        return missing_tokens <= 0 or self.evict_host(missing_tokens) >= missing_tokens

    def _drop_duplicates(self, needed_tokens: int) -> int:
        """Drop host copies of device nodes, in any order; return the tokens freed (SGLang's
        ``_reclaim_full_host_duplicates``)."""
        freed_tokens, reclaimed = 0, []
        for node in self.duplicates:
            if freed_tokens >= needed_tokens:
                break
            is_copied = node.on_host and node.on_device and node.parent is not None
            reclaimed.append(node)
            if is_copied and not node.host_locks:
                self._free_host(node)
                freed_tokens += node.length
        for node in reclaimed:
            del self.duplicates[node]
        return freed_tokens

    def _split(self, node: TierNode, blocks: int) -> TierNode:
        head = super()._split(node, blocks)
        if node in self.duplicates:
            self.duplicates[head] = None
        return head

    def _copy_down(self, node: TierNode) -> None:
        """``write_back``: copy an evicted node to the host if there is room."""
        if self._make_host_room(node.length):
            node.on_host = True
            self.host_used_tokens += node.length
            self.host_written_tokens += node.length
            self.demoted.append(node)
            if self.retains_demoted:
                self.lock_host(node)

    def _kept_blocks(self, node: TierNode, keep_tokens: int, needed_tokens: int) -> int:
        """Return the blocks of a victim that stay: kept by the policy, or not needed."""
        block_tokens = self.block_tokens
        tokens = tokens_kept(
            node.length,
            keep_tokens,
            needed_tokens,
            page_tokens=block_tokens,
            quantum_tokens=self.quantum_tokens,
            whole_nodes=self.whole_nodes,
        )
        return tokens // block_tokens

    def _shorten(self, node: TierNode, kept_blocks: int) -> bool:
        """Cut a leaf to its first ``kept_blocks`` blocks; return False if it has children."""
        if node.children:
            return False
        node.blocks = node.blocks[:kept_blocks]
        node.length = kept_blocks * self.block_tokens
        return True

    def _hand_down(self, node: TierNode, kept_blocks: int) -> bool:
        """Move the end of ``node`` to its only host child, if an earlier cut created that child.

        This avoids chains of small host nodes under eviction by need. Returns whether it succeeded.
        """
        if len(node.children) != 1 or node.host_locks:
            return False
        (child,) = node.children.values()
        if (
            child.on_device
            or child.locks
            or child.hits != node.hits
            or child.last_access != node.last_access
            or child.category != node.category
        ):
            return False
        if child.ranking_tier:
            self._unrank(child)
        kept_tokens = kept_blocks * self.block_tokens
        del node.children[child.blocks[0]]
        child.blocks = node.blocks[kept_blocks:] + child.blocks
        child.offset -= node.length - kept_tokens
        child.length += node.length - kept_tokens
        node.blocks = node.blocks[:kept_blocks]
        node.length = kept_tokens
        node.children[child.blocks[0]] = child
        self._update_rank(child)
        return True
