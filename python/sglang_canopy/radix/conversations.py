"""Where each conversation ends in the tree: for hints that come after its requests, for the parents
of conversations under way, and for what a conversation has left behind."""

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
"""How long after each request and answer of a child its parent's path is kept on the device, within
the tenant's budget of keeps."""
RENEWED_EVERY_S = 15.0
"""How often that is done again while the child's request is under way: an answer may take minutes."""
CHILD_AT_MOST_S = 600.0
"""A request that has not ended by then was aborted, or nobody should wait for it."""
CHILDREN_PER_TENANT, CHILDREN_IN_ALL = 64, 1024
"""Requests that are remembered; the others' parents are kept from arrival and answer alone."""
_GENERATIONS = 8
"""Of conversations that wait for each other."""
_ROOM = 64


@dataclass(slots=True)
class End:
    """Where the last request of a conversation ends."""

    node: UnifiedTreeNode
    first: int | None
    """Hash of the first block of its prompt; ``None`` where that is shorter than a block."""
    blocks: int
    last: int | None
    """How many full blocks its prompt has, and the hash of the last."""
    parent: str | None = None
    """The conversation that waits for this one."""

    def left_by(self, path: list[int]) -> bool:
        """Whether a prompt of these blocks begins as this one did, but does not go on from it."""
        if self.first is None or not path or path[0] != self.first:
            return False
        return len(path) < self.blocks or path[self.blocks - 1] != self.last


class Conversations:
    """The ends of all conversations that are named, by tenant. One conversation a name and tenant.

    Bounded by the size of the tree: entries of removed nodes go first, then the oldest of the
    tenant that has most.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._ends: dict[str | None, dict[Hashable, End]] = {}
        self._count = 0
        self.under_way = UnderWay()

    def __len__(self) -> int:
        return self._count

    def arrived(self, request: LiveRequest) -> None:
        """``request`` comes in, and its policies have heard of it."""
        for tenant, parent in self.under_way.waiting(request.time):
            self._keep_parents(tenant, parent, request.time)
        if request.parent is not None:
            self._keep_parents(request.tenant, request.parent, request.time)
            if request.conversation is not None:
                self.under_way.began(request)
        if request.conversation is None or not request.linear:
            return
        end = self._end(request.tenant, request.conversation)
        if end is None:
            return
        request.left = end.node
        if request.over:  # its client may end a session with a small request of another prompt
            hint = {"tenant": request.tenant, "conversation": request.conversation}
            self.apply_hint({**hint, "time": request.time, "source": request.source, "over": True})
            return
        if end.left_by(request.path):  # type: ignore[arg-type]
            for policy in self.tree.live.learners:
                who = request.tenant, request.conversation
                policy.hinted(who, INFERRED, request.time, True, None)

    def remember(self, request: LiveRequest, node: UnifiedTreeNode) -> None:
        """``request``'s path ends in ``node``."""
        if request.conversation is None:
            return
        if request.done:
            if request.parent is not None:
                self.under_way.ended(request.number)
                self._keep_parents(request.tenant, request.parent, self.tree.clock.now)
            if request.left is not None:
                self._end_branch(request, node)
        full = request.prompt_tokens // request.block_tokens
        path = request.path[:full]
        self._put(
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
        """``node`` leaves the tree: where a conversation ended in it, it ends above."""
        leaf = node.canopy
        mine = self._ends.get(leaf.tenant, {})
        end = mine.get(leaf.conversation)
        if end is None or end.node is not node:
            return
        if node.parent is None or node.parent is self.tree.root_node:
            del mine[leaf.conversation]
            self._count -= 1
        else:
            end.node = node.parent

    def deepest(self, tenant: str | None, conversation: Any) -> UnifiedTreeNode | None:
        """Where a tenant's conversation ends in the tree; ``None`` where nothing of it is there."""
        end = self._end(tenant, conversation)
        return None if end is None else end.node

    def tenants_of(self, conversation: Any) -> list[Any]:
        """Whoever has a conversation of this name in the tree."""
        return [tenant for tenant, ends in self._ends.items() if conversation in ends]

    def apply_hint(self, hint: dict[str, Any]) -> None:
        """Apply what a client says of a conversation to what is cached of it already.

        ``hint`` has ``tenant``, ``conversation``, ``time``, ``source`` and one or more of ``over``,
        ``return_in_s``, ``keep_s``. The policies hear of it, and learn whether it came true; what is
        not cached is not ranked.
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
        """The tree is being emptied."""
        self._ends.clear()
        self._count = 0
        self.under_way.clear()

    # ---- parents and branches ----

    def _keep_parents(self, tenant: str | None, parent: str | None, now: float) -> None:
        """While a conversation runs, the one that waits for it is kept, and who waits for that."""
        seen: set[str] = set()
        while parent is not None and parent not in seen and len(seen) < _GENERATIONS:
            seen.add(parent)
            end = self._end(tenant, parent)
            if end is None:
                return
            self.tree.protected.keep(end.node, now + PARENT_KEPT_S, tenant)
            parent = end.parent

    def _end_branch(self, request: LiveRequest, node: UnifiedTreeNode) -> None:
        """What of the conversation's last path is not on its new one is over, unless the two have
        nothing in common: then it is another conversation of that name."""
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

    def _put(self, tenant: str | None, conversation: Hashable, end: End) -> None:
        mine = self._ends.setdefault(tenant, {})
        self._count -= mine.pop(conversation, None) is not None
        mine[conversation] = end
        self._count += 1
        most = 2 * len(self.tree._node_arena) + _ROOM
        if self._count > most:
            self._purge(most - _ROOM // 2)

    def _purge(self, most: int) -> None:
        """Forget the ends of removed nodes, then the oldest of whoever has most."""
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


class UnderWay:
    """The requests of children between arrival and answer. Time is the requests' clock."""

    def __init__(self) -> None:
        self._began: dict[int, tuple[str | None, str, float]] = {}
        """By a request's number, in order of arrival: tenant, parent, time."""
        self._of: Counter[str | None] = Counter()
        self._named = 0.0

    def __len__(self) -> int:
        return len(self._began)

    def began(self, request: LiveRequest) -> None:
        """A child's request has arrived."""
        tenant, parent = request.tenant, request.parent
        if (
            parent is None
            or len(self) >= CHILDREN_IN_ALL
            or self._of[tenant] >= CHILDREN_PER_TENANT
        ):
            return
        self._began[request.number] = tenant, parent, request.time
        self._of[tenant] += 1

    def ended(self, number: int) -> None:
        """It is answered."""
        tenant, _, _ = self._began.pop(number, (None, "", 0.0))
        if tenant in self._of:
            self._of[tenant] -= 1
            if not self._of[tenant]:
                del self._of[tenant]

    def waiting(self, now: float) -> Iterator[tuple[str | None, str]]:
        """Tenant and name of whoever waits, every ``RENEWED_EVERY_S`` seconds; nobody in between."""
        if now - self._named < RENEWED_EVERY_S:
            return
        self._named = now
        for number in [n for n, (_, _, at) in self._began.items() if now - at > CHILD_AT_MOST_S]:
            self.ended(number)
        yield from dict.fromkeys((tenant, parent) for tenant, parent, _ in self._began.values())

    def clear(self) -> None:
        """The tree is being emptied."""
        self._began.clear()
        self._of.clear()
