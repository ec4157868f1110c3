"""The simulator's radix tree: path-compressed, over block ids, evicting through a ``Policy``.

The tree stores block ids instead of tokens, and drives the policy as the live cache does, but for
``record_eviction`` (``policy/base.py``). Eviction is by need and block-granular: a victim's tail is cut only
by the room needed, and a node is removed once it is empty.

The simulator of whole systems has its own tree with a host tier (canopy_lab's
``sim/system/tree.py``). Without a host it has the same hits, but takes longer per request, a cost
that shadow caches in a server would pay.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import Policy, tokens_kept
from sglang_canopy.policy.keep import KEPT_SHARE, TENANT_KEPT_SHARE, Keeps
from sglang_canopy.records import GATEWAY, Leaf, Request
from sglang_canopy.tenant import ChargedTenants

AnyNode = TypeVar("AnyNode", bound=Any)


_node_numbers = itertools.count()


class Node(Leaf):
    """A run of blocks below ``parent``; for a policy, a ``Leaf``."""

    __slots__ = ("blocks", "children", "locks", "parent")

    def __init__(self, parent: Node | None, blocks: tuple[int, ...], offset: int, length: int):
        super().__init__(offset, length)
        self.number = next(_node_numbers)
        self.parent = parent
        self.blocks = blocks
        self.children: dict[int, Node] = {}
        self.locks = 0
        """Requests in flight whose path ends in this node."""


class TreeCut(NamedTuple):
    """One cut, the argument of ``on_evict``."""

    offset: int
    """Tokens of the path kept before the cut."""
    tokens: int
    blocks: tuple[int, ...]
    """Ids of the evicted blocks; chained ids identify their whole path."""


class RadixTree:
    """A cache of ``capacity_blocks`` blocks of ``block_tokens`` tokens under one policy.

    ``access`` serves a request at one moment. A simulator with overlapping requests runs the steps
    itself: ``match``, ``lock`` the matched node, ``insert``, ``lock`` the leaf and ``unlock`` the
    matched node; at the end of the request, ``mark_used`` and ``unlock`` the leaf.

    ``quantum_tokens``: minimum of one cut (servers: 64). ``whole_nodes``: evict all of a victim
    except its ``keep_tokens``, as SGLang's own eviction does (``tokens_kept``). ``on_evict`` is called
    for every cut. ``optional_caching``: a request need not be cached. ``access`` then makes room
    afterwards, by the policy's choice among all leaves, including the request's own (arXiv
    2510.15152, Section 3 and Algorithm 1). A server cannot do that, since its KV is in memory
    before the choice. ``keep_tenant_share`` and ``keep_total_share`` bound kept paths.
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
        on_evict: Callable[[TreeCut], None] | None = None,
        keep_tenant_share: float = TENANT_KEPT_SHARE,
        keep_total_share: float = KEPT_SHARE,
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
        self._charged_tenants = ChargedTenants()
        self.root = Node(None, (), 0, 0)
        self.used_blocks = 0
        self.eviction_count = 0
        self.evicted_blocks = 0
        self.now = 0.0

    def access(self, request: Request) -> int:
        """Serve a whole request; return the leading blocks of its path that were cached."""
        policy = self.policy
        if request.time > self.now:
            self.now = request.time
        request.label = policy.arrive(request)
        node, hit_blocks = self.match(request.path)
        request.cached_tokens = min(hit_blocks * self.block_tokens, request.prompt_tokens)
        request.label = policy.finish(request)
        self.cache_path(request, node, hit_blocks)
        return hit_blocks

    def cache_path(self, request: Request, node: Node, hit_blocks: int) -> None:
        """Cache the path of a finished request and mark it as used. ``match`` found ``hit_blocks``,
        down to ``node``."""
        self.lock(node)
        leaf = self.insert(request.path, node, hit_blocks)
        self.mark_used(request, leaf)
        # ``insert`` left ``node`` with a child, or returned it as ``leaf``.
        node.locks -= 1
        if leaf is not self.root and not leaf.children and not leaf.locks:
            self.policy.admit(leaf, self.now)
        if self.used_blocks > self.capacity_blocks:
            self.evict(self.used_blocks - self.capacity_blocks)

    def match(self, path: Sequence[int]) -> tuple[Node, int]:
        """Return the node at the end of the cached run of ``path``, and the run's number of blocks. A
        partly matched node is split, so that the run ends at a node's end."""
        path = tuple(path)  # no copy of a tuple; slices must compare equal to ``blocks``
        return cached_run(self.root, path, self._split)

    def lock(self, node: Node) -> None:
        """Lock ``node``, and so its ancestors, until ``unlock``. Locks nest."""
        node.locks += 1
        if node.locks == 1 and not node.children and node is not self.root:
            self.policy.drop(node)

    def unlock(self, node: Node) -> None:
        """Undo one ``lock``; a leaf without locks becomes evictable."""
        assert node.locks > 0, f"unlock of a node that is not locked: {node.blocks[:4]}"
        node.locks -= 1
        if not node.locks and not node.children and node is not self.root:
            self.policy.admit(node, self.now)

    def insert(self, path: Sequence[int], node: Node, hit_blocks: int) -> Node:
        """Add the rest of ``path`` below ``node`` (locked), evicting for it. Returns the path's last
        node, not yet marked used or admitted. If the path does not fit, only its head is cached."""
        missing_blocks = len(path) - hit_blocks
        if missing_blocks <= 0:
            return node
        short_blocks = missing_blocks - (self.capacity_blocks - self.used_blocks)
        if short_blocks > 0 and not self.optional_caching:
            missing_blocks -= max(0, short_blocks - self.evict(short_blocks))
            if missing_blocks <= 0:
                return node
        block_tokens = self.block_tokens
        blocks = tuple(path[hit_blocks : hit_blocks + missing_blocks])
        leaf = Node(node, blocks, hit_blocks * block_tokens, missing_blocks * block_tokens)
        node.children[path[hit_blocks]] = leaf
        self.used_blocks += missing_blocks
        return leaf

    def mark_used(self, request: Request, leaf: Node) -> None:
        """Mark every node from ``leaf`` up to the root as used by ``request``."""
        node, root = leaf, self.root
        while node is not root:
            node.mark_used(request)
            node = node.parent  # type: ignore[assignment]  # only the root has none
        charged_to = self._charged_tenants.choose(
            request.tenant, request.source == GATEWAY, self.now
        )
        if request.keep_until is not None:
            self.keeps.grant(self._path_to(leaf), request.keep_until, charged_to, self.now)

    def evict(self, needed_blocks: int) -> int:
        """Free at least ``needed_blocks`` if the policy has victims; return the blocks freed."""
        freed_blocks = 0
        while freed_blocks < needed_blocks:
            victim = self.policy.victim(self.now)
            if victim is None:
                break
            freed_blocks += self._cut(victim.leaf, victim.keep_tokens, needed_blocks - freed_blocks)  # type: ignore[arg-type]
        return freed_blocks

    def remove(self, leaf: Node) -> None:
        """Remove an expired, unlocked leaf that no policy chose."""
        parent = leaf.parent
        assert parent is not None, "the root cannot expire"
        assert not leaf.children, "not a leaf"
        assert not leaf.locks, "a request holds it"
        self.policy.drop(leaf)
        self.keeps.release(leaf)
        self.used_blocks -= len(leaf.blocks)
        del parent.children[leaf.blocks[0]]
        leaf.parent = None
        if not parent.children and not parent.locks and parent is not self.root:
            self.policy.admit(parent, self.now)

    def nodes(self) -> Iterator[Node]:
        """Iterate over all nodes except the root, parents first."""
        return descendants(self.root)

    def _path_to(self, node: Node) -> list[Node]:
        """Return the nodes down to ``node``, without the root."""
        nodes = []
        while node is not self.root:
            nodes.append(node)
            node = node.parent  # type: ignore[assignment]
        return nodes[::-1]

    def _cut(self, leaf: Node, keep_tokens: int, needed_blocks: int) -> int:
        """Evict the end of ``leaf`` for a need of ``needed_blocks``; return the blocks freed."""
        policy, block_tokens = self.policy, self.block_tokens
        kept_tokens = tokens_kept(
            leaf.length,
            keep_tokens,
            needed_blocks * block_tokens,
            page_tokens=block_tokens,
            quantum_tokens=self.quantum_tokens,
            whole_nodes=self.whole_nodes,
        )
        kept_blocks = kept_tokens // block_tokens
        cut_blocks = len(leaf.blocks) - kept_blocks
        if self.on_evict is not None:
            cut = TreeCut(
                leaf.offset + kept_tokens, cut_blocks * block_tokens, leaf.blocks[kept_blocks:]
            )
            self.on_evict(cut)
        self.used_blocks -= cut_blocks
        self.eviction_count += 1
        self.evicted_blocks += cut_blocks
        policy.drop(leaf)
        # ``record_eviction`` receives the leaf with its length before the cut (see its docstring).
        policy.record_eviction(leaf, cut_blocks * block_tokens)
        self.keeps.shrink(leaf, cut_blocks * block_tokens)
        if kept_blocks:
            leaf.blocks = leaf.blocks[:kept_blocks]
            leaf.length = kept_blocks * block_tokens
            policy.admit(leaf, self.now)
            return cut_blocks
        parent = leaf.parent
        assert parent is not None, "the root was evicted"
        del parent.children[leaf.blocks[0]]
        leaf.parent = None
        if not parent.children and not parent.locks and parent is not self.root:
            policy.admit(parent, self.now)
        return cut_blocks

    def _split(self, node: Node, head_blocks: int) -> Node:
        """Move the first ``head_blocks`` blocks of ``node`` to a new parent, and return the parent."""
        parent, head_tokens = node.parent, head_blocks * self.block_tokens
        assert parent is not None, "the root was split"
        assert 0 < head_blocks < len(node.blocks), f"{head_blocks} of {len(node.blocks)} blocks"
        head = Node(parent, node.blocks[:head_blocks], node.offset, head_tokens)
        head.inherit(node)
        parent.children[head.blocks[0]] = head
        node.blocks = node.blocks[head_blocks:]
        node.parent = head
        node.offset += head.length
        node.length -= head.length
        head.children[node.blocks[0]] = node
        self.keeps.split(node, head)
        self.policy.split(node, head)
        return head


def descendants(root: AnyNode) -> Iterator[AnyNode]:
    """Iterate over all nodes below ``root``, parents first."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def cached_run(
    root: AnyNode, path: tuple[int, ...], split: Callable[[AnyNode, int], AnyNode]
) -> tuple[AnyNode, int]:
    """Return the node at the end of the longest run of ``path`` below ``root``, and the run's
    number of blocks. ``split(node, blocks)`` moves the first ``blocks`` blocks of a partly matched
    node to a node of their own, and returns that node."""
    node, run_blocks = root, 0
    while run_blocks < len(path):
        child = node.children.get(path[run_blocks])
        if child is None:
            break
        end_block = run_blocks + len(child.blocks)
        if path[run_blocks:end_block] != child.blocks:
            shared_blocks = shared_run_blocks(child.blocks, path, run_blocks)
            return split(child, shared_blocks), run_blocks + shared_blocks
        node, run_blocks = child, end_block
    return node, run_blocks


def shared_run_blocks(blocks: tuple[int, ...], path: Sequence[int], start_block: int) -> int:
    """Return the number of leading ``blocks`` that match ``path`` from ``start_block`` on."""
    count = 0
    for block, path_block in zip(blocks, path[start_block : start_block + len(blocks)]):
        if block != path_block:
            break
        count += 1
    return count
