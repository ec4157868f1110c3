"""Track the last node of each conversation, to apply late hints."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from sglang_canopy.bounded import BoundedByTenant
from sglang_canopy.radix.tree import Tree
from sglang_canopy.records import LateHint

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_canopy.radix.live_request import LiveRequest

_SPARE_ENDS = 64
"""Conversations remembered beyond two per node of the tree."""


class Conversations:
    """Last nodes of all named conversations, by tenant and name. Bounded by the size of the tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._end_nodes: BoundedByTenant[Hashable, UnifiedTreeNode] = BoundedByTenant(_SPARE_ENDS)

    def __len__(self) -> int:
        return self._end_nodes.size

    def apply_session_end(self, request: LiveRequest) -> None:
        """Apply the end of a session, which clients may send with a short, unrelated prompt. The
        policies have received the request before."""
        name = request.conversation
        if request.over and request.linear and self.end_node(request.tenant, name) is not None:
            hint = LateHint(request.tenant, name, request.time, request.source, over=True)
            self.apply_hint(hint)

    def set_end(self, request: LiveRequest, node: UnifiedTreeNode) -> None:
        """Record that the path of ``request`` ends at ``node``."""
        if request.conversation is None:
            return
        self._end_nodes.max_size = 2 * len(self.tree._node_arena) + _SPARE_ENDS
        self._end_nodes.put(request.tenant, request.conversation, node)

    def move_end_to_parent(self, node: UnifiedTreeNode) -> None:
        """Move conversations that end at ``node``, which is being removed, to its parent."""
        leaf, parent = node.canopy, node.parent
        if self._end_nodes.get(leaf.tenant, leaf.conversation) is not node:
            return
        if parent is None or parent is self.tree.root_node:
            self._end_nodes.pop(leaf.tenant, leaf.conversation)
        else:
            self._end_nodes.put(leaf.tenant, leaf.conversation, parent)

    def end_node(self, tenant: str | None, conversation: Any) -> UnifiedTreeNode | None:
        """Return the last node of a conversation; ``None`` if it is not cached."""
        node = self._end_nodes.get(tenant, conversation)
        return node if node is not None and self.tree.contains(node) else None

    def tenants_of(self, conversation: Any) -> list[Any]:
        return self._end_nodes.tenants_of(conversation)

    def apply_hint(self, hint: LateHint) -> None:
        """Apply a hint to the cached nodes of a conversation. Policies receive it even if nothing is
        cached, to learn how reliable hints are."""
        tree = self.tree
        for policy in tree.live.learners:
            policy.record_hint(hint)
        node = self.end_node(hint.tenant, hint.conversation)
        if node is None:
            return
        if hint.keep_s is not None:
            charged_to = tree.protected.charged_tenant(hint.tenant, hint.source)
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
        self._end_nodes.clear()
