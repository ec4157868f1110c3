"""The nodes of one instance's tree: tiers, locks and the policies that rank them.

A node is on the device, on the host, or on both. The parent of a device node is on the device too. A
node without children on the device can be evicted from it; a node only on the host without children
can be evicted from the host. Each tier's policy ranks exactly these leaves, as in a live server
(``radix/evictable.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from canopy_lab.sim.system.tier_spec import Expiry
from sglang_canopy.policy.awaited import AwaitedPaths
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.block_tree import descendants
from sglang_canopy.records import Leaf

_numbers = itertools.count()
NO_TIER, DEVICE, HOST = 0, 1, 2
"""Tier whose policy ranks a node."""


class TierNode(Leaf):
    """A run of blocks below ``parent`` and the tiers it is on."""

    __slots__ = (
        *("blocks", "children", "device_children", "host_locks", "locks", "on_device", "on_host"),
        *("last_ranking_tier", "last_request", "parent", "ranking_tier"),
    )

    def __init__(self, parent: TierNode | None, blocks: tuple[int, ...], offset: int, length: int):
        super().__init__(offset, length)
        self.number = next(_numbers)
        self.parent: Any = parent
        self.blocks = blocks
        self.children: dict[int, TierNode] = {}
        self.on_device = False
        self.on_host = False
        self.device_children = 0
        self.locks = 0
        """Running requests whose path includes this node."""
        self.host_locks = 0
        """Prefetches that start at this node's end and writes of it to the disk. The host keeps
        such a node (SGLang's ``host_lock_ref``)."""
        self.ranking_tier = NO_TIER
        """Tier whose policy currently ranks this node."""
        self.last_ranking_tier = NO_TIER
        """Last tier whose policy ranked this node, and to which ``rank_state`` belongs."""
        self.last_request = -1
        """Number of the last request counted in ``hits``."""


class Match(NamedTuple):
    """Cached prefix of a path: on the device, and on device and host together."""

    device_node: TierNode
    device_tokens: int
    node: TierNode
    blocks: int
    tokens: int


def _count_shared(blocks: tuple[int, ...], path: tuple[int, ...], depth: int, stop: int) -> int:
    """Count the leading ``blocks`` that agree with ``path`` from ``depth`` on; the first one does."""
    low, high = 1, min(len(blocks), stop - depth)
    while low < high:
        middle = (low + high + 1) // 2
        if blocks[middle - 1] == path[depth + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


class TierNodes:
    """The tree of device and host, without transfers (``tree.py``).

    Lengths are exact, in tokens; splits are at block boundaries. A leaf's last block may be partial
    and grows when a request adds the rest.
    """

    def __init__(
        self,
        device_policy: Policy,
        device_tokens: int,
        block_tokens: int,
        host_policy: Policy | None,
        host_tokens: int,
        host_expiry: Expiry | None,
    ) -> None:
        self.device_policy = device_policy
        self.host_policy = host_policy
        self.device_tokens = device_tokens
        self.host_tokens = host_tokens if host_policy is not None else 0
        self.block_tokens = block_tokens
        self.expiry = host_expiry
        self.root = TierNode(None, (), 0, 0)
        self.root.on_device = True
        self.device_used_tokens = 0
        self.host_used_tokens = 0
        self._freed_later: dict[TierNode, int] = {}
        """Host tokens of nodes removed under a host lock, freed with the last lock."""
        self.private_tokens = 0
        """Device tokens of running requests outside the tree."""
        self.evictable_tokens = 0
        """Unlocked tokens of the tree on the device."""
        self.now = 0.0
        self.awaited = AwaitedPaths(device_tokens)
        """Nodes protected for waiting requests."""

    @property
    def free_tokens(self) -> int:
        return self.device_tokens - self.device_used_tokens - self.private_tokens

    @property
    def available_tokens(self) -> int:
        """Device tokens that are free or can be evicted."""
        return self.free_tokens + self.evictable_tokens

    def match(
        self, path: tuple[int, ...], start: TierNode | None = None, stop: int | None = None
    ) -> Match:
        """Match the first ``stop`` blocks of ``path`` (default: all); split a partly matched node.

        The search begins at ``start``, a device node on the path. Ids are chained, so a run of
        blocks matches if its last block does.
        """
        node = device = self.root if start is None else start
        depth = -(-(node.offset + node.length) // self.block_tokens)
        if stop is None or stop > len(path):
            stop = len(path)
        expiry = self.expiry
        while depth < stop:
            child = node.children.get(path[depth])
            if child is None:
                break
            if expiry is not None and not child.on_device and self._remove_if_expired(child):
                break
            blocks = child.blocks
            end = depth + len(blocks)
            is_whole = end <= stop and path[end - 1] == blocks[-1]
            if not is_whole:
                shared = _count_shared(blocks, path, depth, stop)
                child = self._split(child, shared)
                end = depth + shared
            node, depth = child, end
            if child.on_device:
                device = child
            if not is_whole:
                break
        return Match(device, device.offset + device.length, node, depth, node.offset + node.length)

    def lock(self, node: TierNode, locked_ancestor: TierNode | None = None) -> None:
        """Lock ``node`` up to the root, or to ``locked_ancestor``, until ``unlock``. Nests."""
        stop = self.root if locked_ancestor is None else locked_ancestor
        while node is not stop:
            node.locks += 1
            if node.locks == 1:
                if node.on_device:
                    self.evictable_tokens -= node.length
                if node.ranking_tier:
                    self._unrank(node)
            node = node.parent

    def unlock(self, node: TierNode) -> None:
        root = self.root
        while node is not root:
            node.locks -= 1
            if not node.locks:
                if node.on_device:
                    self.evictable_tokens += node.length
                    if not node.device_children:
                        self._update_rank(node)
                elif not node.children:
                    self._update_rank(node)
            node = node.parent

    def lock_host(self, node: TierNode) -> None:
        """Keep ``node`` on the host until ``unlock_host``, for a prefetch or disk write. Nests."""
        node.host_locks += 1
        if node.ranking_tier == HOST:
            self._unrank(node)

    def unlock_host(self, node: TierNode) -> None:
        node.host_locks -= 1
        if self._freed_later and not node.host_locks:
            self.host_used_tokens -= self._freed_later.pop(node, 0)
        if node is not self.root and node.parent.children.get(node.blocks[0]) is node:
            self._update_rank(node)

    def protect(self, node: TierNode, tenant: str | None) -> None:
        """Protect the path to ``node`` for a waiting request (as in ``radix/protected.py``)."""
        now = self.now
        if node is self.root or node.last_access >= now or self.awaited.is_fresh(node, now):
            return
        self._protect(node, tenant)

    def replace_protection(self, protected: Sequence[tuple[TierNode, str | None]]) -> None:
        """Protect exactly these (node, tenant) pairs, the first with precedence."""
        for leaf in self.awaited:
            assert isinstance(leaf, TierNode)
            if leaf.ranking_tier:
                self._unrank(leaf)
            self.awaited.end_protection(leaf)
            self._update_rank(leaf)
        for node, tenant in protected:
            if node is not self.root and node.awaited_until is None:
                self._protect(node, tenant)

    def _protect(self, node: TierNode, tenant: str | None) -> None:
        """Protect ``node`` and its deepest ancestor on the device."""
        now, device_ancestor = self.now, node
        while device_ancestor is not self.root and not device_ancestor.on_device:
            device_ancestor = device_ancestor.parent
        protected = [node] if device_ancestor in (node, self.root) else [node, device_ancestor]
        for end in protected:
            if end.ranking_tier:
                self._unrank(end)
            end.last_access = max(end.last_access, now)
        self.awaited.protect(node, tenant, now, *protected[1:])
        for end in protected:
            self._update_rank(end)

    def touch(self, node: TierNode) -> None:
        """Make the path to ``node`` the most recently used (SGLang's ``match_prefix``)."""
        now = self.now
        while node is not self.root:
            if node.ranking_tier:
                self._unrank(node)
            node.last_access = max(node.last_access, now)
            self._update_rank(node)
            node = node.parent

    def nodes(self) -> Iterator[TierNode]:
        return descendants(self.root)

    def verify(self) -> None:
        """Verify all counts. Raises ``AssertionError`` naming the first mismatch."""
        device = host = evictable = 0
        for node in self.nodes():
            name = (node.offset, node.blocks[:4])
            assert node.on_device or node.on_host, f"{name} is nowhere"
            assert not node.on_device or node.parent.on_device, f"{name} hangs below a hole"
            full_tokens = len(node.blocks) * self.block_tokens
            assert full_tokens - self.block_tokens < node.length <= full_tokens, f"length of {name}"
            assert node.length == full_tokens or not node.children, f"partial block inside: {name}"
            assert node.offset == node.parent.offset + node.parent.length, f"offset of {name}"
            children = sum(child.on_device for child in node.children.values())
            assert node.device_children == children, f"device children of {name}"
            device += node.length * node.on_device
            host += node.length * node.on_host
            evictable += node.length * (node.on_device and not node.locks)
            assert node.ranking_tier == self._tier_to_rank(node), f"{name} ranks in the wrong tier"
        assert device == self.device_used_tokens, f"device: {device}, {self.device_used_tokens}"
        assert host <= self.host_used_tokens, f"host: {host}, {self.host_used_tokens} noted"
        assert evictable == self.evictable_tokens, f"{evictable}, {self.evictable_tokens} noted"
        assert self.free_tokens >= 0, f"the device is over full by {-self.free_tokens}"
        assert self.host_used_tokens <= self.host_tokens, "the host is over full"

    # ---- private ----

    def _tier_to_rank(self, node: TierNode) -> int:
        if node.locks or node is self.root:
            return NO_TIER
        if node.on_device:
            return NO_TIER if node.device_children else DEVICE
        return HOST if node.on_host and not node.children and not node.host_locks else NO_TIER

    def _update_rank(self, node: TierNode) -> None:
        tier = self._tier_to_rank(node)
        if tier == node.ranking_tier:
            return
        if node.ranking_tier:
            self._unrank(node)
        if tier:
            node.ranking_tier = tier
            if node.last_ranking_tier != tier:
                node.last_ranking_tier, node.rank_state = tier, None
            policy = self.device_policy if tier == DEVICE else self.host_policy
            policy.admit(node, self.now)  # type: ignore[union-attr]

    def _unrank(self, node: TierNode) -> None:
        policy = self.device_policy if node.ranking_tier == DEVICE else self.host_policy
        policy.drop(node)  # type: ignore[union-attr]
        node.ranking_tier = NO_TIER

    def _delete(self, node: TierNode) -> None:
        """Remove ``node`` and its subtree; no part of it may be on the device."""
        del node.parent.children[node.blocks[0]]
        stack = [node]
        while stack:
            deleted = stack.pop()
            if deleted.awaited_until is not None:
                self.awaited.end_protection(deleted)
            if deleted.on_host:
                self._free_host(deleted)
            if deleted.ranking_tier:
                self._unrank(deleted)
            stack.extend(deleted.children.values())

    def _free_host(self, node: TierNode) -> None:
        """Remove ``node`` from the host; its memory is freed with the last host lock."""
        node.on_host = False
        if node.host_locks:
            self._freed_later[node] = self._freed_later.get(node, 0) + node.length
        else:
            self.host_used_tokens -= node.length

    def _remove_if_expired(self, node: TierNode) -> bool:
        """Return True if ``node`` was expired and unused, and has been removed."""
        assert self.expiry is not None
        if not self.expiry.has_expired(node, self.now):
            return False
        stack = [node]
        while stack:
            descendant = stack.pop()
            if descendant.locks or descendant.host_locks or descendant.on_device:
                return False
            stack.extend(descendant.children.values())
        parent = node.parent
        self._delete(node)
        self._update_rank(parent)
        return True

    def _split(self, node: TierNode, blocks: int) -> TierNode:
        """Move ``node``'s first ``blocks`` blocks to a new parent; return the parent."""
        parent, tokens = node.parent, blocks * self.block_tokens
        head = TierNode(parent, node.blocks[:blocks], node.offset, tokens)
        head.inherit(node)
        head.on_device, head.on_host = node.on_device, node.on_host
        head.locks, head.last_request = node.locks, node.last_request
        head.device_children = int(node.on_device)
        parent.children[head.blocks[0]] = head
        node.blocks = node.blocks[blocks:]
        node.parent = head
        node.offset += tokens
        node.length -= tokens
        head.children[node.blocks[0]] = node
        if node.awaited_until is not None:
            self.awaited.split(node, head)
        head.last_ranking_tier = node.last_ranking_tier
        if node.last_ranking_tier:
            policy = self.device_policy if node.last_ranking_tier == DEVICE else self.host_policy
            policy.split(node, head)  # type: ignore[union-attr]
        return head
