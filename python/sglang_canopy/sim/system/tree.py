"""One instance's radix tree over device and host memory, as HiCache keeps it.

A node is on the device, on the host, or on both. What is on the device is closed towards the root,
so a node without children on the device may leave it; a node that is on the host alone and has no
children may leave the host. The policy of each tier sees exactly those leaves, as in a live server
(``radix/core.py``), and eviction is by need: a victim's tail is cut only as far as room is needed.

Lengths are in tokens and exact; cuts fall on block boundaries. The last block of a leaf may be
partial, and grows when a request brings the rest of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from sglang_canopy.policy.base import Leaf, Policy, Request
from sglang_canopy.sim.system.expiry import Expiry

_NONE, _DEVICE, _HOST = 0, 1, 2


class TierNode(Leaf):
    """A run of blocks below ``parent`` and the tiers it is on."""

    __slots__ = (
        "blocks",
        "children",
        "device",
        "device_children",
        "host",
        "locks",
        "parent",
        "ranked",
        "ranker",
        "served",
    )

    def __init__(self, parent: TierNode | None, blocks: tuple[int, ...], offset: int, length: int):
        super().__init__(offset, length)
        self.parent: Any = parent
        self.blocks = blocks
        self.children: dict[int, TierNode] = {}
        self.device = False
        self.host = False
        self.device_children = 0
        self.locks = 0
        """Requests in flight whose path runs through this node."""
        self.ranked = _NONE
        """The tier whose policy ranks this node at the moment."""
        self.ranker = _NONE
        """The tier whose policy ``slot`` belongs to: the last one that ranked this node."""
        self.served = -1
        """Number of the last request counted in ``hits``."""


class Match(NamedTuple):
    """How far a path is cached: on the device, and on device and host together."""

    device: TierNode
    device_blocks: int
    device_tokens: int
    node: TierNode
    blocks: int
    tokens: int


class TieredTree:
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
        quantum_tokens: int = 64,
    ) -> None:
        self.device_policy = device_policy
        self.host_policy = host_policy
        self.device_tokens = device_tokens
        self.host_tokens = host_tokens if host_policy is not None else 0
        self.block_tokens = block_tokens
        self.expiry = host_expiry
        self.write_back = write_back
        self.whole_nodes = whole_nodes
        self.quantum_tokens = quantum_tokens
        self.root = TierNode(None, (), 0, 0)
        self.root.device = True
        self.device_used = 0
        self.host_used = 0
        self.private = 0
        """Device tokens of running requests that are not in the tree (yet)."""
        self.evictable = 0
        """Tokens of the tree on the device that no request holds."""
        self.host_written = 0
        """Tokens copied to the host so far."""
        self.demoted: list[TierNode] = []
        """Nodes that ``write_back`` copied to the host, until somebody clears the list."""
        self.now = 0.0

    # ---- looking up ----

    def match(self, path: tuple[int, ...], since: TierNode | None = None) -> Match:
        """The cached run of ``path``; a node matched in part is split.

        ``since`` is a device node known to be on the path: the search begins there.
        """
        node = device = self.root if since is None else since
        at = device_at = -(-(node.offset + node.length) // self.block_tokens)
        stop = len(path)
        while at < stop:
            child = node.children.get(path[at])
            if child is None:
                break
            if self.expiry is not None and not child.device and self._expired(child):
                break
            end = at + len(child.blocks)
            whole = path[at:end] == child.blocks
            if not whole:
                shared = _shared_run(child.blocks, path, at)
                child = self._split(child, shared)
                end = at + shared
            node, at = child, end
            if child.device:
                device, device_at = child, end
            if not whole:
                break
        return Match(
            device, device_at, device.offset + device.length, node, at, node.offset + node.length
        )

    def peek(self, path: tuple[int, ...]) -> int:
        """Blocks of ``path`` that are cached; changes nothing."""
        node, at = self.root, 0
        while at < len(path):
            child = node.children.get(path[at])
            if child is None:
                break
            end = at + len(child.blocks)
            if path[at:end] != child.blocks:
                return at + _shared_run(child.blocks, path, at)
            node, at = child, end
        return at

    def lock(self, node: TierNode) -> None:
        """Keep ``node`` and its ancestors until ``unlock``. Nests."""
        while node is not self.root:
            node.locks += 1
            if node.locks == 1:
                if node.device:
                    self.evictable -= node.length
                if node.ranked:
                    self._unrank(node)
            node = node.parent

    def unlock(self, node: TierNode) -> None:
        """Undo one ``lock``."""
        while node is not self.root:
            node.locks -= 1
            if not node.locks:
                if node.device:
                    self.evictable += node.length
                self._reconsider(node)
            node = node.parent

    def move_lock(self, above: TierNode | None, node: TierNode) -> None:
        """Turn a lock on ``above`` (none: the root) into one on ``node``, which is below it."""
        stop = self.root if above is None else above
        while node is not stop:
            node.locks += 1
            if node.locks == 1:
                if node.device:
                    self.evictable -= node.length
                if node.ranked:
                    self._unrank(node)
            node = node.parent

    # ---- room on the device ----

    @property
    def free(self) -> int:
        """Device tokens that nothing occupies."""
        return self.device_tokens - self.device_used - self.private

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
        found = self.match(path[:blocks], since)
        node, added = found.node, 0
        above = node
        while not above.device:
            above.device = True
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
                if node.host and self._host_room(missing):
                    self.host_used += missing
                elif node.host:
                    node.host = False
                    self.host_used -= node.length
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
            node.parent.device_children += 1
            loaded += node.length
            if not node.locks:
                self.evictable += node.length
            node = node.parent
        self.device_used += loaded
        return loaded

    def back_up(self, node: TierNode) -> int:
        """Copy ``node``, and its ancestors first, to the host (write-through); returns tokens."""
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
            self.host_used += node.length
            copied += node.length
        self.host_written += copied
        return copied

    def add_to_host(self, path: tuple[int, ...], since: int, blocks: int, like: Leaf | None) -> int:
        """Blocks ``since`` to ``blocks`` of ``path`` came from storage to the host.

        Returns the tokens added; their room was claimed before with ``claim_host``. Nothing is
        added where what is before them has gone. ``like`` gives a new node its attributes.
        """
        found = self.match(path[:blocks])
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
        if node.ranked == _HOST:
            self._unrank(node)
        self.host_used += leaf.length
        self._reconsider(leaf)
        return leaf.length

    def claim_host(self, tokens: int) -> int:
        """Make room on the host for up to ``tokens``; returns how many there is room for."""
        self._host_room(tokens)
        return max(0, min(tokens, self.host_tokens - self.host_used))

    def stamp(self, node: TierNode, request: Request, number: int) -> None:
        """Mark every node up to the root as used by request ``number``, once a request."""
        while node is not self.root:
            ranked = node.ranked
            if ranked:
                self._unrank(node)
            if node.served == number:
                node.refresh(request)
            else:
                node.stamp(request)
                node.served = number
            if ranked:
                self._reconsider(node)
            node = node.parent

    # ---- eviction ----

    def evict_device(self, need: int) -> int:
        """Free at least ``need`` device tokens if there are victims; returns tokens freed."""
        freed = 0
        policy = self.device_policy
        while freed < need:
            victim = policy.victim(self.now)
            if victim is None:
                break
            node: TierNode = victim.leaf  # type: ignore[assignment]
            kept = self._kept(node, victim.keep, need - freed, self.whole_nodes)
            gone = node.length - kept * self.block_tokens
            if self.write_back and not node.host:
                if kept:
                    self._split(node, kept)
                    kept = 0
                self._copy_down(node)
            freed += gone
            self.device_used -= gone
            self.evictable -= gone
            self._unrank(node)
            policy.evicted(node, gone)
            if kept and (self._hand_down(node, kept) if node.host else self._shorten(node, kept)):
                self._reconsider(node)
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
            kept = self._kept(node, victim.keep, need - freed, self.whole_nodes)
            gone = node.length - kept * self.block_tokens
            freed += gone
            self._unrank(node)
            policy.evicted(node, gone)
            if kept:
                self.host_used -= gone
                self._shorten(node, kept)
                self._reconsider(node)
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
            while node.ranked == _HOST and self.expiry.over(node, self.now):
                gone += node.length
                parent = node.parent
                self._unrank(node)
                self._delete(node)
                self._reconsider(parent)
                node = parent
        return gone

    # ---- checks ----

    def nodes(self) -> Iterator[TierNode]:
        """Every node but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def verify(self) -> None:
        """Recount everything; raises ``AssertionError`` naming what disagrees."""
        device = host = evictable = 0
        for node in self.nodes():
            name = (node.offset, node.blocks[:4])
            assert node.device or node.host, f"{name} is nowhere"
            assert not node.device or node.parent.device, f"{name} hangs below a hole"
            full = len(node.blocks) * self.block_tokens
            assert full - self.block_tokens < node.length <= full, f"length of {name}"
            assert node.length == full or not node.children, f"partial block inside: {name}"
            assert node.offset == node.parent.offset + node.parent.length, f"offset of {name}"
            children = sum(child.device for child in node.children.values())
            assert node.device_children == children, f"device children of {name}"
            device += node.length * node.device
            host += node.length * node.host
            evictable += node.length * (node.device and not node.locks)
            assert node.ranked == self._place(node), f"{name} is ranked in the wrong tier"
        assert device == self.device_used, f"device: {device} counted, {self.device_used} noted"
        assert host <= self.host_used, f"host: {host} counted, {self.host_used} noted"
        assert evictable == self.evictable, f"evictable: {evictable}, {self.evictable} noted"
        assert self.free >= 0, f"the device is over full by {-self.free}"
        assert self.host_used <= self.host_tokens, "the host is over full"

    # ---- private ----

    def _place(self, node: TierNode) -> int:
        if node.locks or node is self.root:
            return _NONE
        if node.device:
            return _NONE if node.device_children else _DEVICE
        return _HOST if node.host and not node.children else _NONE

    def _reconsider(self, node: TierNode) -> None:
        place = self._place(node)
        if place == node.ranked:
            return
        if node.ranked:
            self._unrank(node)
        if place:
            node.ranked = place
            if node.ranker != place:
                node.ranker, node.slot = place, None
            policy = self.device_policy if place == _DEVICE else self.host_policy
            policy.admit(node, self.now)  # type: ignore[union-attr]

    def _unrank(self, node: TierNode) -> None:
        policy = self.device_policy if node.ranked == _DEVICE else self.host_policy
        policy.drop(node)  # type: ignore[union-attr]
        node.ranked = _NONE

    def _host_room(self, tokens: int) -> bool:
        short = tokens - (self.host_tokens - self.host_used)
        return short <= 0 or self.evict_host(short) >= short

    def _copy_down(self, node: TierNode) -> None:
        """``write_back``: copy a node to the host on its way out, if there is room."""
        if self._host_room(node.length):
            node.host = True
            self.host_used += node.length
            self.host_written += node.length
            self.demoted.append(node)

    def _kept(self, node: TierNode, keep: int, need: int, whole: bool) -> int:
        """Blocks of a victim that stay."""
        if not whole:
            keep = max(keep, node.length - max(need, self.quantum_tokens))
        return min(-(-keep // self.block_tokens), len(node.blocks) - 1)

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
        if len(node.children) != 1:
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

    def _delete(self, node: TierNode) -> None:
        """Take ``node`` and all below it out of the tree; nothing of it is on the device."""
        del node.parent.children[node.blocks[0]]
        stack = [node]
        while stack:
            gone = stack.pop()
            if gone.host:
                self.host_used -= gone.length
            if gone.ranked:
                self._unrank(gone)
            stack.extend(gone.children.values())

    def _expired(self, node: TierNode) -> bool:
        """Whether ``node`` is past its time; if nothing holds it, it is gone then."""
        assert self.expiry is not None
        if not self.expiry.over(node, self.now):
            return False
        stack = [node]
        while stack:
            below = stack.pop()
            if below.locks or below.device:
                return False
            stack.extend(below.children.values())
        parent = node.parent
        self._delete(node)
        self._reconsider(parent)
        return True

    def _split(self, node: TierNode, at: int) -> TierNode:
        """Give ``node``'s first ``at`` blocks to a new parent, which is returned."""
        parent, tokens = node.parent, at * self.block_tokens
        head = TierNode(parent, node.blocks[:at], node.offset, tokens)
        head.inherit(node)
        head.device, head.host = node.device, node.host
        head.locks, head.served = node.locks, node.served
        head.device_children = int(node.device)
        parent.children[head.blocks[0]] = head
        node.blocks = node.blocks[at:]
        node.parent = head
        node.offset += tokens
        node.length -= tokens
        head.children[node.blocks[0]] = node
        head.ranker = node.ranker
        if node.ranker:
            policy = self.device_policy if node.ranker == _DEVICE else self.host_policy
            policy.split(node, head)  # type: ignore[union-attr]
        return head


def _shared_run(blocks: tuple[int, ...], path: tuple[int, ...], at: int) -> int:
    shared = 0
    for mine, theirs in zip(blocks, path[at : at + len(blocks)]):
        if mine != theirs:
            break
        shared += 1
    return shared
