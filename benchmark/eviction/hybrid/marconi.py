"""Marconi's cache (arXiv 2411.19379), built from its published description, not from its code.

One budget holds KV and states. A request leaves at most two states: at its end, and at the
branching point that its prompt makes in the radix tree (Section 4.1). The victim is the node of least

    S(n) = recency(n) + alpha * flop_efficiency(n)

with both terms scaled to [0, 1] over the candidates, flop_efficiency the FLOPs that the node saves
over its parent by the bytes that it holds (Section 4.2). Candidates have at most one child: a leaf goes
whole; a node with one child loses its state and its child takes over its KV. Only the node that a
request used becomes recent, not those above it.

Marconi finds alpha by replaying a first window of requests. Here it is an argument: a benchmark
that takes the best of several in hindsight is kinder to it.
"""

from __future__ import annotations

import numpy as np

from hybrid.shape import HybridShape
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.block_tree import cached_run
from sglang_canopy.records import Request


class _Node:
    __slots__ = ("blocks", "children", "end", "locked", "parent", "row", "state")

    def __init__(self, parent: _Node | None, blocks: tuple[int, ...], end: int, row: int) -> None:
        self.parent = parent
        self.blocks = blocks
        self.children: dict[int, _Node] = {}
        self.end = end
        """Blocks of the path down to this node's end."""
        self.state = False
        self.locked = False
        self.row = row


class MarconiTree:
    """A cache of ``capacity_bytes`` for a model of ``shape``; ``alpha`` weighs FLOP efficiency."""

    def __init__(
        self, shape: HybridShape, capacity_bytes: int, block_tokens: int, alpha: float
    ) -> None:
        if capacity_bytes < 1 or not alpha >= 0:
            raise CanopyError(
                f"a cache needs bytes and alpha 0 or above, got {capacity_bytes} and {alpha}"
            )
        self.shape = shape
        self.capacity_bytes = capacity_bytes
        self.block_tokens = block_tokens
        self.alpha = alpha
        self.block_bytes = shape.kv_bytes_per_token * block_tokens
        self.used_bytes = 0
        self.states_evicted = 0
        self._nodes: list[_Node | None] = []
        self._free: list[int] = []
        self._seen = np.full(64, -np.inf)
        self._efficiency = np.zeros(64)
        self._candidate = np.zeros(64, dtype=bool)
        self.root = self._new(None, (), 0, 0.0)

    def access(self, request: Request) -> int:
        """Serve one request whole; returns the blocks that it need not compute."""
        path, now = tuple(request.path), request.time
        node, found = cached_run(self.root, path, self._split)
        start = node
        while start is not self.root and not start.state:
            start = start.parent  # type: ignore[assignment]
        hit = start.end
        self._seen[start.row] = now
        self._lock(node, True)
        if found > hit and found < len(path) and node is not self.root:
            self._keep_state(node, now)
        leaf = node
        if found < len(path):
            need = (len(path) - found) * self.block_bytes + self.shape.state_bytes
            if self._make_room(need):
                leaf = self._new(node, path[found:], len(path), now)
                node.children[path[found]] = leaf
                leaf.locked = True
                self.used_bytes += (len(path) - found) * self.block_bytes
                self._weigh(node)
        if leaf is not self.root and leaf.end == len(path):
            self._keep_state(leaf, now)
        self._lock(leaf, False)
        return hit

    def _split(self, node: _Node, at: int) -> _Node:
        parent = node.parent
        assert parent is not None, "the root was split"
        head = self._new(parent, node.blocks[:at], parent.end + at, float(self._seen[node.row]))
        parent.children[head.blocks[0]] = head
        node.blocks = node.blocks[at:]
        node.parent = head
        head.children[node.blocks[0]] = node
        self._weigh(head)
        self._weigh(node)
        return head

    def _keep_state(self, node: _Node, now: float) -> None:
        if not node.state and self._make_room(self.shape.state_bytes):
            node.state = True
            self.used_bytes += self.shape.state_bytes
        self._seen[node.row] = now
        self._weigh(node)

    def _make_room(self, need: int) -> bool:
        while self.used_bytes + need > self.capacity_bytes:
            victim = self._victim()
            if victim is None:
                return False
            self._evict(victim)
        return True

    # S(n) = recency(n) + alpha * flop_efficiency(n), each scaled to [0, 1]
    # victim = the candidate of least S
    def _victim(self) -> _Node | None:
        rows = np.flatnonzero(self._candidate)
        if not rows.size:
            return None
        score = _scaled(self._seen[rows])
        if self.alpha:
            score = score + self.alpha * _scaled(self._efficiency[rows])
        return self._nodes[rows[int(np.argmin(score))]]

    def _evict(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None, "the root was evicted"
        if node.state:
            self.used_bytes -= self.shape.state_bytes
            self.states_evicted += 1
        del parent.children[node.blocks[0]]
        if node.children:  # one: it takes over the KV
            (child,) = node.children.values()
            child.blocks = node.blocks + child.blocks
            child.parent = parent
            parent.children[child.blocks[0]] = child
            self._weigh(child)
        else:
            self.used_bytes -= len(node.blocks) * self.block_bytes
        self._nodes[node.row] = None
        self._candidate[node.row] = False
        self._free.append(node.row)
        self._weigh(parent)

    def _lock(self, node: _Node, locked: bool) -> None:
        above: _Node | None = node
        while above is not None:
            above.locked = locked
            self._weigh(above)
            above = above.parent

    def _weigh(self, node: _Node) -> None:
        """The saving of the node over its parent, divided by the bytes that its eviction frees."""
        row, parent = node.row, node.parent
        # A branching node without a state is shared KV; it is evicted after its children.
        goes = not node.children or (len(node.children) == 1 and node.state)
        self._candidate[row] = goes and not node.locked and parent is not None
        if parent is None:
            return
        tokens = self.block_tokens
        saved = 0
        if node.state:
            flops = self.shape.prefill_flops
            saved = flops(node.end * tokens) - flops(parent.end * tokens)
        held = self.shape.state_bytes * node.state + len(node.blocks) * self.block_bytes
        self._efficiency[row] = saved / held

    def _new(self, parent: _Node | None, blocks: tuple[int, ...], end: int, now: float) -> _Node:
        if self._free:
            row = self._free.pop()
        else:
            row = len(self._nodes)
            self._nodes.append(None)
            if row >= self._seen.size:
                self._seen = np.concatenate([self._seen, np.full(row, -np.inf)])
                self._efficiency = np.concatenate([self._efficiency, np.zeros(row)])
                self._candidate = np.concatenate([self._candidate, np.zeros(row, dtype=bool)])
        node = _Node(parent, blocks, end, row)
        self._nodes[row] = node
        self._seen[row] = now
        self._weigh(node)
        return node

    def verify(self) -> None:
        """Recount everything; raises ``AssertionError``."""
        used = 0
        for node in self._nodes:
            if node is None or node is self.root:
                continue
            parent = node.parent
            assert parent is not None
            assert parent.children[node.blocks[0]] is node
            assert node.end == parent.end + len(node.blocks)
            assert not node.locked
            used += len(node.blocks) * self.block_bytes + node.state * self.shape.state_bytes
        assert used == self.used_bytes
        assert used <= self.capacity_bytes


def _scaled(values: np.ndarray) -> np.ndarray:
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else np.zeros_like(values)
