"""Track the last node of each conversation.

Used to apply late hints, to keep the parents of running conversations, and to detect abandoned
branches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_canopy.radix.tree import Tree
from sglang_canopy.records import CLIENT, INFERRED, Leaf

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_canopy.radix.live_request import LiveRequest

PARENT_KEPT_S = 60.0
"""Seconds that a parent's path stays on the device after each request or answer of a child, within
the tenant's keep budget."""
RENEWED_EVERY_S = 15.0
"""Seconds between renewals of the keep during a long answer of the child."""
CHILD_AT_MOST_S = 600.0
"""Age at which a child's request is presumed aborted, or its parent to have stopped waiting."""
CHILDREN_PER_TENANT, CHILDREN_IN_ALL = 64, 1024
"""Limits on tracked child requests; beyond them, parents are kept on arrival and answer only."""
_MAX_ANCESTORS = 8
"""Maximum length of a chain of waiting parents."""
_SPARE_ENDS = 64


@dataclass(slots=True)
class End:
    """End of a conversation's latest request."""

    node: UnifiedTreeNode
    first: int | None
    """Hash of the prompt's first block; ``None`` if the prompt is shorter than a block."""
    blocks: int
    last: int | None
    """Number of whole blocks in the prompt, and the hash of the last block."""
    parent: str | None = None
    """Conversation that waits for this one."""

    def left_by(self, path: list[int]) -> bool:
        """Return whether a prompt shares the first block of this one but does not extend it."""
        if self.first is None or not path or path[0] != self.first:
            return False
        return len(path) < self.blocks or path[self.blocks - 1] != self.last


class Conversations:
    """Ends of all named conversations, by tenant and name.

    Bounded by the size of the tree: entries of removed nodes are dropped first, then the oldest
    of the tenant with the most entries.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._ends: dict[str | None, dict[Hashable, End]] = {}
        self._count = 0
        self.running_children = RunningChildren()

    def __len__(self) -> int:
        return self._count

    def received(self, request: LiveRequest) -> None:
        """Keep the conversations that wait for running or waiting children."""
        if request.time - self.running_children.renewed_at >= RENEWED_EVERY_S:
            for tenant, parent in self.running_children.waiting(request.time):
                self._keep_parents(tenant, parent, request.time)
        if request.parent is not None:
            self._keep_parents(request.tenant, request.parent, request.time)
            if request.conversation is not None and request.first is None:
                self.running_children.began(request)

    def admitted(self, request: LiveRequest) -> None:
        """Handle an admitted request, after the policies have received it."""
        if request.conversation is None or not request.linear:
            return
        end = self._end(request.tenant, request.conversation)
        if end is None:
            return
        request.left = end.node
        if request.over:  # clients may end a session with a short, unrelated prompt
            hint = {"tenant": request.tenant, "conversation": request.conversation}
            self.apply_hint({**hint, "time": request.time, "source": request.source, "over": True})
            return
        if end.left_by(request.path):  # type: ignore[arg-type]
            for policy in self.tree.live.learners:
                who = request.tenant, request.conversation
                policy.hinted(who, INFERRED, request.time, True, None)

    def remember(self, request: LiveRequest, node: UnifiedTreeNode) -> None:
        """Record that the path of ``request`` ends at ``node``."""
        if request.conversation is None:
            return
        if request.done:
            if request.parent is not None and not request.samples:
                self.running_children.ended(request.number)
                self._keep_parents(request.tenant, request.parent, self.tree.clock.now)
            if request.left is not None:
                self._retire_branch(request, node)
        full = request.prompt_tokens // request.block_tokens
        path = request.path[:full]
        self._store(
            request.tenant,
            request.conversation,
            End(
                node,
                path[0] if path else None,
                len(path),
                path[-1] if path else None,
                request.parent,
            ),
        )

    def gone(self, node: UnifiedTreeNode) -> None:
        """Move conversations that end at ``node``, which is being removed, to its parent."""
        leaf = node.canopy
        mine = self._ends.get(leaf.tenant, {})
        end = mine.get(leaf.conversation)
        if end is None or end.node is not node:
            return
        if node.parent is None or node.parent is self.tree.root_node:
            del mine[leaf.conversation]
            self._count -= 1
            if not mine:
                del self._ends[leaf.tenant]
        else:
            end.node = node.parent

    def deepest(self, tenant: str | None, conversation: Any) -> UnifiedTreeNode | None:
        """Return the last node of a conversation; ``None`` if it is not cached."""
        end = self._end(tenant, conversation)
        return None if end is None else end.node

    def tenants_of(self, conversation: Any) -> list[Any]:
        return [tenant for tenant, ends in self._ends.items() if conversation in ends]

    def apply_hint(self, hint: dict[str, Any]) -> None:
        """Apply a client's hint to the cached nodes of a conversation.

        ``hint`` has ``tenant``, ``conversation``, ``time``, ``source``, and at least one of
        ``over``, ``return_in_s``, ``keep_s``. Policies receive it even if nothing is cached, to
        learn how reliable hints are.
        """
        tree = self.tree
        source = hint.get("source", CLIENT)
        for policy in tree.live.learners:
            policy.hinted(
                (hint["tenant"], hint["conversation"]),
                source,
                hint["time"],
                hint.get("over", False),
                hint.get("return_in_s"),
            )
        end = self._end(hint["tenant"], hint["conversation"])
        if end is None:
            return
        node = end.node
        return_in_s, keep_s = hint.get("return_in_s"), hint.get("keep_s")
        if keep_s is not None:
            tree.protected.keep(node, hint["time"] + keep_s, node.canopy.tenant)
        while node is not tree.root_node:
            leaf = node.canopy
            tree.readmit(node)
            if leaf.conversation == hint["conversation"]:
                leaf.over = hint.get("over", leaf.over) and not leaf.shared
                leaf.source = source
                if return_in_s is not None:
                    leaf.return_at = hint["time"] + return_in_s
            node = node.parent

    def clear(self) -> None:
        self._ends.clear()
        self._count = 0
        self.running_children.clear()

    # ---- parents and branches ----

    def _keep_parents(self, tenant: str | None, parent: str | None, now: float) -> None:
        """Keep the conversation that waits for a running one, and its ancestors in turn."""
        seen: set[str] = set()
        while parent is not None and parent not in seen and len(seen) < _MAX_ANCESTORS:
            seen.add(parent)
            end = self._end(tenant, parent)
            if end is None:
                return
            self.tree.protected.keep(end.node, now + PARENT_KEPT_S, tenant)
            parent = end.parent

    def _retire_branch(self, request: LiveRequest, node: UnifiedTreeNode) -> None:
        """Mark as over the nodes of the previous path that the new path has abandoned.

        Paths without a common node belong to different conversations of the same name; no node is
        marked then.
        """
        tree, left = self.tree, request.left
        request.left = None
        assert left is not None
        if not tree.contains(left):
            return
        on_path = set()
        while node is not tree.root_node:
            on_path.add(node)
            node = node.parent
        branch = []
        while left is not tree.root_node and left not in on_path:
            branch.append(left)
            left = left.parent
        if left is tree.root_node:
            return
        for node in branch:
            leaf: Leaf = node.canopy
            own = leaf.conversation == request.conversation and leaf.tenant == request.tenant
            if own and not leaf.shared and not leaf.over:
                tree.readmit(node)
                leaf.over, leaf.source = True, INFERRED

    # ---- the ends ----

    def _end(self, tenant: str | None, conversation: Hashable) -> End | None:
        end = self._ends.get(tenant, {}).get(conversation)
        return end if end is not None and self.tree.contains(end.node) else None

    def _store(self, tenant: str | None, conversation: Hashable, end: End) -> None:
        mine = self._ends.setdefault(tenant, {})
        self._count -= mine.pop(conversation, None) is not None
        mine[conversation] = end
        self._count += 1
        most = 2 * len(self.tree._node_arena) + _SPARE_ENDS
        if self._count > most:
            self._purge(most - _SPARE_ENDS // 2)

    def _purge(self, most: int) -> None:
        """Drop the ends of removed nodes, then the oldest ends of the largest tenant."""
        for tenant, ends in list(self._ends.items()):
            alive = {name: end for name, end in ends.items() if self.tree.contains(end.node)}
            if alive:
                self._ends[tenant] = alive
            else:
                del self._ends[tenant]
        self._count = sum(len(ends) for ends in self._ends.values())
        while self._count > most:
            largest = max(self._ends.values(), key=len)
            second = sorted((len(ends) for ends in self._ends.values()), reverse=True)[1:2]
            down_to = max([*second, len(largest) - (self._count - most), 1])
            surplus = max(1, len(largest) - down_to)
            for name in list(largest)[:surplus]:
                del largest[name]
            self._count -= surplus
            if not largest:
                self._ends = {tenant: ends for tenant, ends in self._ends.items() if ends}


class RunningChildren:
    """Running requests of child conversations. Times are on the requests' clock."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[str | None, str, float]] = {}
        """Request number -> (tenant, parent, arrival), in order of arrival."""
        self._children: Counter[str | None] = Counter()
        self.renewed_at = 0.0
        """Time of the last call of ``waiting``."""

    def __len__(self) -> int:
        return len(self._running)

    def began(self, request: LiveRequest) -> None:
        """Track a child's request, within the limits."""
        tenant, parent = request.tenant, request.parent
        if (
            parent is None
            or len(self) >= CHILDREN_IN_ALL
            or self._children[tenant] >= CHILDREN_PER_TENANT
        ):
            return
        self._running[request.number] = tenant, parent, request.time
        self._children[tenant] += 1

    def ended(self, number: int) -> None:
        child = self._running.pop(number, None)
        if child is None:
            return  # beyond the limits
        tenant, _, _ = child
        self._children[tenant] -= 1
        if not self._children[tenant]:
            del self._children[tenant]

    def waiting(self, now: float) -> Iterator[tuple[str | None, str]]:
        """Yield (tenant, name) of each waiting parent. Call it every ``RENEWED_EVERY_S``."""
        self.renewed_at = now
        for number in [n for n, (_, _, at) in self._running.items() if now - at > CHILD_AT_MOST_S]:
            self.ended(number)
        yield from dict.fromkeys((tenant, parent) for tenant, parent, _ in self._running.values())

    def clear(self) -> None:
        self._running.clear()
        self._children.clear()
