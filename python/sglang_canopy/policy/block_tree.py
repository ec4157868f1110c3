"""The simulator's radix tree: path-compressed, over block ids, evicting through a ``Policy``.

It holds no tokens, only which blocks would be cached, and drives the policy exactly as the
live cache does (``policy/base.py``). Eviction is by need and block-granular: a victim's tail
is cut only as far as room is needed, and a node goes only when nothing of it is left.

The simulator of whole systems has a tree of its own with a host below (canopy_lab's
``sim/system/tree.py``). Without a host it hits the same, but takes 47 % longer a request under LRU,
which shadow caches in a server pay for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.cut import tokens_kept
from sglang_canopy.policy.keep import TENANT_SHARE, TOTAL_SHARE, Keeps
from sglang_canopy.records import Leaf, Request

AnyNode = TypeVar("AnyNode", bound=Any)


_numbers = itertools.count()


class Node(Leaf):
    """A run of blocks below ``parent``; a policy sees it as a ``Leaf``."""

    __slots__ = ("blocks", "children", "locks", "parent")

    def __init__(self, parent: Node | None, blocks: tuple[int, ...], offset: int, length: int):
        super().__init__(offset, length)
        self.number = next(_numbers)
        self.parent = parent
        self.blocks = blocks
        self.children: dict[int, Node] = {}
        self.locks = 0
        """Requests in flight whose path ends in this node (its ancestors have a child)."""


class Evicted(NamedTuple):
    """One cut, as ``on_evict`` gets it: where on which path, in tokens and in block ids."""

    offset: int
    """Tokens of the path that stay before the cut."""
    tokens: int
    blocks: tuple[int, ...]
    """Ids of the blocks that went; chained ids name their whole path."""


class RadixTree:
    """A cache of ``capacity_blocks`` blocks of ``block_tokens`` tokens under one policy.

    ``access`` serves a request at one moment. A simulator whose requests overlap does its steps
    itself: ``match``, ``lock`` what was found, ``insert``, ``lock`` the leaf and ``unlock`` what was
    found; and when the request ends ``stamp`` and ``unlock`` the leaf.

    ``quantum_tokens`` is the least that one cut takes (servers: 64); ``whole_nodes`` evicts all of a victim but
    its ``keep``, as SGLang's own eviction does (``policy/cut.py``). ``on_evict`` sees every cut.
    With ``optional_caching`` a request need not be cached: ``access`` makes room after it, by the
    policy's choice among all leaves, the request's own too (arXiv 2510.15152, Section 3 and
    Algorithm 1). A server cannot do that; its KV is in memory before anything is chosen.
    ``keep_tenant_share`` and ``keep_total_share`` bound what requests may keep.
    """

    def __init__(
        self,
        policy: Policy,
        capacity_blocks: int,
        block_tokens: int,
        *,
        quantum_tokens: int = 1,
        whole_nodes: bool = False,
        optional_caching: bool = False,
        on_evict: Callable[[Evicted], None] | None = None,
        keep_tenant_share: float = TENANT_SHARE,
        keep_total_share: float = TOTAL_SHARE,
    ) -> None:
        if capacity_blocks < 1:
            raise CanopyError(
                f"a simulated cache needs room for at least 1 block, got {capacity_blocks}; "
                "give a larger capacity"
            )
        if quantum_tokens < 1:
            raise CanopyError(
                f"the eviction quantum must be at least 1 token, got {quantum_tokens}; "
                "give a larger one"
            )
        self.policy = policy
        self.capacity_blocks = capacity_blocks
        self.block_tokens = block_tokens
        self.quantum_tokens = quantum_tokens
        self.whole_nodes = whole_nodes
        self.optional_caching = optional_caching
        self.on_evict = on_evict
        self.keeps = Keeps(capacity_blocks * block_tokens, keep_tenant_share, keep_total_share)
        self.root = Node(None, (), 0, 0)
        self.used_blocks = 0
        self.evictions = 0
        self.evicted_blocks = 0
        self.now = 0.0

    def access(self, request: Request) -> int:
        """Serve one request whole; returns how many leading blocks of its path were cached."""
        policy = self.policy
        if request.time > self.now:
            self.now = request.time
        request.label = policy.arrive(request)
        node, hit = self.match(request.path)
        request.cached_tokens = min(hit * self.block_tokens, request.prompt_tokens)
        request.label = policy.finish(request)
        self.keep(request, node, hit)
        return hit

    def keep(self, request: Request, node: Node, hit: int) -> None:
        """Cache the whole path of a request that has ended, of which ``match`` found ``hit`` blocks
        down to ``node``, and mark it as used."""
        self.lock(node)
        leaf = self.insert(request.path, node, hit)
        self.stamp(request, leaf)
        # ``insert`` moved on from ``node``: it has a child now, or it is ``leaf``.
        node.locks -= 1
        if leaf is not self.root and not leaf.children and not leaf.locks:
            self.policy.admit(leaf, self.now)
        if self.used_blocks > self.capacity_blocks:
            self.evict(self.used_blocks - self.capacity_blocks)

    def match(self, path: Sequence[int]) -> tuple[Node, int]:
        """The node where the cached run of ``path`` ends, and that run's blocks.

        A node that is matched only in part is split, so that the run ends at a node's end.
        """
        path = tuple(path)  # no copy of a tuple; slices must compare equal to ``blocks``
        return cached_run(self.root, path, self._split)

    def lock(self, node: Node) -> None:
        """Keep ``node`` (and so its ancestors) until ``unlock``. Nests."""
        node.locks += 1
        if node.locks == 1 and not node.children and node is not self.root:
            self.policy.drop(node)

    def unlock(self, node: Node) -> None:
        """Undo one ``lock``; a leaf without locks becomes evictable again."""
        assert node.locks > 0, f"unlock of a node that is not locked: {node.blocks[:4]}"
        node.locks -= 1
        if not node.locks and not node.children and node is not self.root:
            self.policy.admit(node, self.now)

    def insert(self, path: Sequence[int], node: Node, hit: int) -> Node:
        """Add the rest of ``path`` below ``node`` (locked), evicting for it.

        Returns the path's last node, not yet stamped or admitted. Where the path does not
        fit, its head is kept and its tail is not cached.
        """
        missing = len(path) - hit
        if missing <= 0:
            return node
        short = missing - (self.capacity_blocks - self.used_blocks)
        if short > 0 and not self.optional_caching:
            missing -= max(0, short - self.evict(short))
            if missing <= 0:
                return node
        tokens = self.block_tokens
        leaf = Node(node, tuple(path[hit : hit + missing]), hit * tokens, missing * tokens)
        node.children[path[hit]] = leaf
        self.used_blocks += missing
        return leaf

    def stamp(self, request: Request, leaf: Node) -> None:
        """Mark every node from ``leaf`` up to the root as used by ``request``."""
        node, root = leaf, self.root
        while node is not root:
            node.stamp(request)
            node = node.parent  # type: ignore[assignment]  # only the root has none
        if request.keep_until is not None:
            path = self._path_to(leaf)
            self.keeps.ask(path, request.keep_until, request.tenant, self.now)

    def evict(self, need_blocks: int) -> int:
        """Free at least ``need_blocks`` if the policy has victims; returns the blocks freed."""
        freed = 0
        while freed < need_blocks:
            victim = self.policy.victim(self.now)
            if victim is None:
                break
            freed += self._cut(victim.leaf, victim.keep, need_blocks - freed)  # type: ignore[arg-type]
        return freed

    def remove(self, leaf: Node) -> None:
        """Take out an unlocked leaf that no policy chose: it has expired."""
        parent = leaf.parent
        assert parent is not None, "the root cannot expire"
        assert not leaf.children, "not a leaf"
        assert not leaf.locks, "a request holds it"
        self.policy.drop(leaf)
        self.keeps.gone(leaf)
        self.used_blocks -= len(leaf.blocks)
        del parent.children[leaf.blocks[0]]
        leaf.parent = None
        if not parent.children and not parent.locks and parent is not self.root:
            self.policy.admit(parent, self.now)

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        return below(self.root)

    def verify(self) -> None:
        """Recount everything; raises ``AssertionError`` naming what disagrees."""
        used, evictable = 0, set()
        self.keeps.check(self.nodes())
        for node in self.nodes():
            parent, tokens = node.parent, self.block_tokens
            assert parent is not None, f"node {node.blocks[:4]} has no parent"
            assert node.blocks, "an empty node stayed in the tree"
            assert parent.children.get(node.blocks[0]) is node, f"misfiled child {node.blocks[:4]}"
            assert node.length == len(node.blocks) * tokens, f"length of {node.blocks[:4]}"
            assert node.offset == parent.offset + parent.length, f"offset of {node.blocks[:4]}"
            assert node.last_access <= parent.last_access or parent is self.root, (
                f"{node.blocks[:4]} was used at {node.last_access}, its parent only at "
                f"{parent.last_access}"
            )
            if node.hits == 0:  # its request is still in flight
                assert node.locks or node.children, f"{node.blocks[:4]} was never stamped"
            used += len(node.blocks)
            if not node.children and not node.locks:
                evictable.add(id(node))
        assert used == self.used_blocks, f"{used} blocks in the tree, {self.used_blocks} counted"
        assert used <= self.capacity_blocks, f"{used} blocks in a cache of {self.capacity_blocks}"
        try:
            admitted = [id(leaf) for leaf in self.policy.leaves()]
        except NotImplementedError:
            return
        assert len(admitted) == len(set(admitted)), "the policy admitted a leaf twice"
        assert set(admitted) == evictable, (
            f"the policy ranks {len(admitted)} leaves, {len(evictable)} are evictable"
        )

    def _path_to(self, node: Node) -> list[Node]:
        """The nodes down to ``node``, the root left out."""
        path = []
        while node is not self.root:
            path.append(node)
            node = node.parent  # type: ignore[assignment]
        return path[::-1]

    def _cut(self, leaf: Node, keep_tokens: int, need: int) -> int:
        """Evict the end of ``leaf``, for a need of ``need`` blocks; returns the blocks freed."""
        policy, tokens = self.policy, self.block_tokens
        kept = tokens_kept(
            leaf.length,
            keep_tokens,
            need * tokens,
            page=tokens,
            quantum=self.quantum_tokens,
            whole_nodes=self.whole_nodes,
        )
        keep = kept // tokens
        gone = len(leaf.blocks) - keep
        if self.on_evict is not None:
            cut = Evicted(leaf.offset + keep * tokens, gone * tokens, leaf.blocks[keep:])
            self.on_evict(cut)
        self.used_blocks -= gone
        self.evictions += 1
        self.evicted_blocks += gone
        policy.drop(leaf)
        # ``evicted`` sees the length before the cut (see Policy.evicted).
        policy.evicted(leaf, gone * tokens)
        self.keeps.shrink(leaf, gone * tokens)
        if keep:
            leaf.blocks = leaf.blocks[:keep]
            leaf.length = keep * tokens
            policy.admit(leaf, self.now)
            return gone
        parent = leaf.parent
        assert parent is not None, "the root was evicted"
        del parent.children[leaf.blocks[0]]
        leaf.parent = None
        if not parent.children and not parent.locks and parent is not self.root:
            policy.admit(parent, self.now)
        return gone

    def _split(self, node: Node, at: int) -> Node:
        """Give ``node``'s first ``at`` blocks to a new parent, which is returned."""
        parent, tokens = node.parent, self.block_tokens
        assert parent is not None, "the root was split"
        assert 0 < at < len(node.blocks), f"split of {len(node.blocks)} blocks at {at}"
        head = Node(parent, node.blocks[:at], node.offset, at * tokens)
        head.inherit(node)
        parent.children[head.blocks[0]] = head
        node.blocks = node.blocks[at:]
        node.parent = head
        node.offset += head.length
        node.length -= head.length
        head.children[node.blocks[0]] = node
        self.keeps.split(node, head)
        self.policy.split(node, head)
        return head


def below(root: AnyNode) -> Iterator[AnyNode]:
    """Every node below ``root``, parents first."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def cached_run(
    root: AnyNode, path: tuple[int, ...], split: Callable[[AnyNode, int], AnyNode]
) -> tuple[AnyNode, int]:
    """The node where the longest run of ``path`` ends below ``root``, and that run's blocks.

    ``split(node, n)`` gives a node of its own to the first ``n`` blocks of one that is matched only
    in part, and returns it.
    """
    node, at = root, 0
    while at < len(path):
        child = node.children.get(path[at])
        if child is None:
            break
        end = at + len(child.blocks)
        if path[at:end] != child.blocks:
            shared = shared_run(child.blocks, path, at)
            return split(child, shared), at + shared
        node, at = child, end
    return node, at


def shared_run(blocks: tuple[int, ...], path: Sequence[int], at: int) -> int:
    """How many of ``blocks`` are those of ``path`` from ``at`` on."""
    shared = 0
    for mine, theirs in zip(blocks, path[at : at + len(blocks)]):
        if mine != theirs:
            break
        shared += 1
    return shared
