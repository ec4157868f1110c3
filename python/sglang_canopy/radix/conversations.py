"""Track the last node of each conversation.

Used to apply late hints, and to detect abandoned branches.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_canopy.bounded import BoundedByTenant
from sglang_canopy.radix.live_request import State
from sglang_canopy.radix.tree import Tree
from sglang_canopy.records import INFERRED, LateHint, Leaf

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_canopy.radix.live_request import LiveRequest

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

    def left_by(self, path: list[int]) -> bool:
        """Return whether a prompt shares the first block of this one but does not extend it."""
        if self.first is None or not path or path[0] != self.first:
            return False
        return len(path) < self.blocks or path[self.blocks - 1] != self.last


class Conversations:
    """Ends of all named conversations, by tenant and name.

    Bounded by the size of the tree.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._ends: BoundedByTenant[Hashable, End] = BoundedByTenant(_SPARE_ENDS)

    def __len__(self) -> int:
        return self._ends.size

    def admitted(self, request: LiveRequest) -> None:
        """Handle an admitted request, after the policies have received it."""
        if request.conversation is None or not request.linear:
            return
        end = self._end(request.tenant, request.conversation)
        if end is None:
            return
        request.previous_end = end.node
        if request.over:  # clients may end a session with a short, unrelated prompt
            self.apply_hint(_over(request, request.source))
        elif end.left_by(request.path):  # type: ignore[arg-type]
            for policy in self.tree.live.learners:
                policy.hinted(_over(request, INFERRED))

    def remember(self, request: LiveRequest, node: UnifiedTreeNode) -> None:
        """Record that the path of ``request`` ends at ``node``."""
        if request.conversation is None:
            return
        if request.state is State.DONE and request.previous_end is not None:
            self._retire_branch(request, node)
        full = request.prompt_tokens // request.block_tokens
        path = request.path[:full]
        end = End(node, path[0] if path else None, len(path), path[-1] if path else None)
        self._ends.limit = 2 * len(self.tree._node_arena) + _SPARE_ENDS
        self._ends.put(request.tenant, request.conversation, end)

    def node_removed(self, node: UnifiedTreeNode) -> None:
        """Move conversations that end at ``node``, which is being removed, to its parent."""
        leaf = node.canopy
        end = self._ends.get(leaf.tenant, leaf.conversation)
        if end is None or end.node is not node:
            return
        if node.parent is None or node.parent is self.tree.root_node:
            self._ends.pop(leaf.tenant, leaf.conversation)
        else:
            end.node = node.parent

    def deepest(self, tenant: str | None, conversation: Any) -> UnifiedTreeNode | None:
        """Return the last node of a conversation; ``None`` if it is not cached."""
        end = self._end(tenant, conversation)
        return None if end is None else end.node

    def tenants_of(self, conversation: Any) -> list[Any]:
        return self._ends.tenants_of(conversation)

    def apply_hint(self, hint: LateHint) -> None:
        """Apply a hint to the cached nodes of a conversation.

        Policies receive it even if nothing is cached, to learn how reliable hints are.
        """
        tree = self.tree
        for policy in tree.live.learners:
            policy.hinted(hint)
        end = self._end(hint.tenant, hint.conversation)
        if end is None:
            return
        node = end.node
        if hint.keep_s is not None:
            charged_to = tree.protected.charge(hint.tenant, hint.source)
            tree.protected.keep_path(node, hint.time + hint.keep_s, charged_to)
        while node is not tree.root_node:
            leaf = node.canopy
            tree.readmit(node)
            if leaf.conversation == hint.conversation:
                leaf.over = (leaf.over if hint.over is None else hint.over) and not leaf.shared
                leaf.source = hint.source
                if hint.return_in_s is not None:
                    leaf.return_at = hint.time + hint.return_in_s
            node = node.parent

    def clear(self) -> None:
        self._ends.clear()

    # ---- branches ----

    def _retire_branch(self, request: LiveRequest, node: UnifiedTreeNode) -> None:
        """Mark as over the nodes of the previous path that the new path has abandoned.

        Paths without a common node belong to different conversations of the same name; no node is
        marked then.
        """
        tree, abandoned = self.tree, request.previous_end
        request.previous_end = None
        assert abandoned is not None
        if not tree.contains(abandoned):
            return
        on_path = set()
        while node is not tree.root_node:
            on_path.add(node)
            node = node.parent
        branch = []
        while abandoned is not tree.root_node and abandoned not in on_path:
            branch.append(abandoned)
            abandoned = abandoned.parent
        if abandoned is tree.root_node:
            return
        for node in branch:
            leaf: Leaf = node.canopy
            is_same = leaf.conversation == request.conversation and leaf.tenant == request.tenant
            if is_same and not leaf.shared and not leaf.over:
                tree.readmit(node)
                leaf.over, leaf.source = True, INFERRED

    # ---- the ends ----

    def _end(self, tenant: str | None, conversation: Hashable) -> End | None:
        end = self._ends.get(tenant, conversation)
        return end if end is not None and self.tree.contains(end.node) else None


def _over(request: LiveRequest, source: str) -> LateHint:
    return LateHint(request.tenant, request.conversation, request.time, source, over=True)
