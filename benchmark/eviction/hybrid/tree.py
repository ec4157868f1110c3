"""SGLang's cache of a hybrid model: a radix tree of KV, and states at the ends of some nodes.

KV and states have pools of their own. A lookup ends at the deepest node of its path that has a
state. A request leaves a state at its prompt's end and, where it parts from a cached path beyond
the last state, one at that branching point. A state that has to go leaves its node behind, unless
the node is a leaf, which goes whole; KV goes by whole leaves (SGLang 0.5.23,
``components/mamba.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

from sglang_canopy.policy.base import Policy, Victim
from sglang_canopy.policy.block_tree import Node, RadixTree, below
from sglang_canopy.policy.states import Cost, State, StatePolicy, linear_cost
from sglang_canopy.records import Leaf, Request


class UsableFirst(Policy):
    """``inner``, after the leaves at which no lookup can end."""

    def __init__(self, inner: Policy, states: dict[Node, State]) -> None:
        super().__init__(inner.config)
        self.inner = inner
        self._states = states
        self._unusable: dict[Leaf, None] = {}

    def arrive(self, request: Request) -> str:
        return self.inner.arrive(request)

    def finish(self, request: Request) -> str:
        return self.inner.finish(request)

    def admit(self, leaf: Leaf, now: float) -> None:
        if leaf in self._states:
            self.inner.admit(leaf, now)
        else:
            self._unusable[leaf] = None

    def drop(self, leaf: Leaf) -> None:
        if leaf in self._unusable:
            del self._unusable[leaf]
        else:
            self.inner.drop(leaf)

    def victim(self, now: float) -> Victim | None:
        if self._unusable:
            return Victim(next(iter(self._unusable)))
        return self.inner.victim(now)

    def evicted(self, leaf: Leaf, tokens: int) -> None:
        self.inner.evicted(leaf, tokens)

    def split(self, leaf: Leaf, head: Leaf) -> None:
        if leaf not in self._unusable:
            self.inner.split(leaf, head)

    def leaves(self) -> Iterator[Leaf]:
        yield from self._unusable
        yield from self.inner.leaves()


class HybridTree(RadixTree):
    """A cache of ``capacity_blocks`` blocks of KV and ``slots`` states.

    ``cost`` of a prompt's first tokens gives the saving of a state. ``unusable_first``: KV at
    which no lookup can end is evicted before the policy's victims, as in Canopy's live tree.
    """

    def __init__(
        self,
        policy: Policy,
        states: StatePolicy,
        capacity_blocks: int,
        slots: int,
        block_tokens: int,
        *,
        cost: Cost = linear_cost,
        unusable_first: bool = True,
    ) -> None:
        self.states: dict[Node, State] = {}
        if unusable_first:
            policy = UsableFirst(policy, self.states)
        super().__init__(policy, capacity_blocks, block_tokens, whole_nodes=True)
        self.state_policy = states
        self.slots = slots
        self.cost = cost
        self.states_evicted = 0
        self._nodes: dict[int, Node] = {}
        """The node of each state, by the state's ``id``."""

    def access(self, request: Request) -> int:
        """Serve one request whole; returns the blocks that it need not compute."""
        policy, order = self.policy, self.state_policy
        self.now = max(self.now, request.time)
        request.label = policy.arrive(request)
        node, found = self.match(request.path)
        start = self._last_with_state(node)
        hit = (start.offset + start.length) // self.block_tokens
        request.cached_tokens = min(hit * self.block_tokens, request.prompt_tokens)
        request.label = policy.finish(request)
        used = self.states.get(start)
        if used is not None:  # SGLang locks it until it is copied
            order.drop(used)
            used.last_access = self.now
        self.lock(node)
        leaf = self.insert(request.path, node, found)
        self.stamp(request, leaf)
        self.lock(leaf)
        self.unlock(node)
        if found > hit and node is not leaf:
            self._leave_state(node)
        if leaf.offset + leaf.length == len(request.path) * self.block_tokens:
            self._leave_state(leaf)
        if used is not None and used.slot is None and self.states.get(start) is used:
            order.admit(used, self.now)
        self.unlock(leaf)
        return hit

    def _last_with_state(self, node: Node) -> Node:
        while node is not self.root and node not in self.states:
            node = node.parent  # type: ignore[assignment]
        return node

    def _leave_state(self, node: Node) -> None:
        """Keep the state at the end of ``node``, which is locked or has a locked child."""
        if node is self.root:
            return
        state = self.states.get(node)
        order = self.state_policy
        if state is None:
            if len(self.states) >= self.slots:
                victim = order.victim(self.now)
                if victim is None:
                    return
                self._evict_state(victim)
            state = State(node.offset + node.length, self.now, node.number)
            self.states[node] = state
            self._nodes[id(state)] = node
        else:
            order.drop(state)
            state.last_access = self.now
        self._value(node)
        order.admit(state, self.now)
        for other in self._next_states(node):
            self._revalue(other)

    def _evict_state(self, state: State) -> None:
        """SGLang's order: a leaf is evicted whole, another node keeps its KV without its state."""
        node = self._nodes[id(state)]
        self.states_evicted += 1
        if node.children or node.locks:
            self._forget(node)
            for other in self._next_states(node):
                self._revalue(other)
        else:
            self.remove(node)
            self._forget(node)

    def _forget(self, node: Node) -> None:
        state = self.states.pop(node, None)
        if state is not None:
            self.state_policy.drop(state)
            del self._nodes[id(state)]

    def _cut(self, leaf: Node, keep_tokens: int, need: int) -> int:
        freed = super()._cut(leaf, 0, need)
        self._forget(leaf)
        return freed

    # ---- what each state saves ----

    def _value(self, node: Node) -> None:
        above = self._last_with_state(node.parent)  # type: ignore[arg-type]
        self.states[node].saves = self.cost(node.offset + node.length) - self.cost(
            above.offset + above.length
        )

    def _revalue(self, node: Node) -> None:
        state = self.states[node]
        admitted = state.slot is not None
        if admitted:
            self.state_policy.drop(state)
        self._value(node)
        if admitted:
            self.state_policy.admit(state, self.now)

    def _next_states(self, node: Node) -> Iterator[Node]:
        """The nearest nodes with a state below ``node``."""
        stack = list(node.children.values())
        while stack:
            child = stack.pop()
            if child in self.states:
                yield child
            else:
                stack.extend(child.children.values())

    def verify(self) -> None:
        super().verify()
        nodes = set(below(self.root))
        assert set(self.states) <= nodes, "a state of a node that is gone"
        assert len(self.states) <= self.slots, f"{len(self.states)} states in {self.slots} slots"
        assert set(self.state_policy.states()) == set(self.states.values())
        for node, state in self.states.items():
            assert state.offset == node.offset + node.length
            above = self._last_with_state(node.parent)  # type: ignore[arg-type]
            saves = self.cost(state.offset) - self.cost(above.offset + above.length)
            assert state.saves == saves, "a state's saving is not that of its place"
