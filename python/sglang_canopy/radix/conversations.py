"""Where each conversation ends in the tree, for hints that come after its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_canopy.records import CLIENT, Request

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_canopy.radix.node_metadata import NodeMetadataCore


class Conversations:
    """The deepest node of each conversation; entries of removed nodes are purged as it grows."""

    def __init__(self, tree: NodeMetadataCore) -> None:
        self.tree = tree
        self._deepest: dict[tuple[Any, Any], UnifiedTreeNode] = {}

    def remember(self, request: Request, node: UnifiedTreeNode) -> None:
        """``request``'s path ends in ``node``."""
        if request.conversation is None:
            return
        if len(self._deepest) > 2 * len(self.tree._node_arena) + 64:
            contains = self.tree.contains
            self._deepest = {key: node for key, node in self._deepest.items() if contains(node)}
        self._deepest[request.tenant, request.conversation] = node

    def gone(self, node: UnifiedTreeNode) -> None:
        """``node`` leaves the tree: where a conversation ended in it, it ends above."""
        leaf: Any = node.canopy
        key = (leaf.tenant, leaf.conversation)
        above = node.parent
        if above is not None and self._deepest.get(key) is node:
            self._deepest[key] = above

    def deepest(self, tenant: str | None, conversation: Any) -> UnifiedTreeNode | None:
        """Where a tenant's conversation ends in the tree; ``None`` where nothing of it is there."""
        node = self._deepest.get((tenant, conversation))
        if node is None or node is self.tree.root_node or not self.tree.contains(node):
            return None
        return node

    def tenants_of(self, conversation: Any) -> list[Any]:
        """Whoever has a conversation of this name in the tree."""
        return [tenant for tenant, name in self._deepest if name == conversation]

    def apply_hint(self, hint: dict[str, Any]) -> None:
        """Apply what a client says of a conversation to what is cached of it already.

        ``hint`` has ``tenant``, ``conversation``, ``time``, ``source`` and one or more of ``over``,
        ``return_in_s``, ``keep_s``. The policies hear of it, and learn whether it came true; what is
        not cached is not ranked.
        """
        tree = self.tree
        source = hint.get("source", CLIENT)
        for policy in tree.live.listeners:
            policy.heard(
                (hint["tenant"], hint["conversation"]),
                source,
                hint["time"],
                hint.get("over", False),
                hint.get("return_in_s"),
            )
        node = self._deepest.get((hint["tenant"], hint["conversation"]))
        if node is None or not tree.contains(node):
            return
        return_in_s, keep_s = hint.get("return_in_s"), hint.get("keep_s")
        if keep_s is not None:
            tree.keep_path(node, hint["time"] + keep_s, node.canopy.tenant)
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
        self._deepest.clear()
