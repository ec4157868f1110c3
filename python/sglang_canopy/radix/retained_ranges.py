"""What requests ask for parts of their paths (``request/retention.py``), on the nodes of the tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_canopy.radix.leaf import set_offsets
from sglang_canopy.request.fields import MAX_KEEP_S
from sglang_canopy.request.retention import ANSWER, DEVICE, HOST, Retention

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_canopy.radix.live_request import LiveRequest
    from sglang_canopy.radix.node_metadata import NodeMetadataCore


def split_at_ends(
    tree: NodeMetadataCore, node: UnifiedTreeNode, request: LiveRequest, actions: list[Any]
) -> None:
    """Split the path to ``node`` where ranges begin and end, down to whole pages, so that each node
    is in a range or not. What the splits leave to do is appended to ``actions``."""
    set_offsets(node)
    ends = set()
    for wish in request.ranges:
        start = request.prompt_tokens if wish.start == ANSWER else wish.start
        ends |= {start, start if wish.end is None else wish.end}
    below = sorted({end // tree.page_size * tree.page_size for end in ends} - {0})
    while below and node is not tree.root_node:
        leaf = node.canopy
        while below and below[-1] >= leaf.offset + leaf.length:
            below.pop()
        if below and below[-1] > leaf.offset:
            _, action = tree._split_node(node.key, node, below.pop() - leaf.offset)
            if action is not None:
                actions.append(action)
        node = node.parent


def apply(tree: NodeMetadataCore, node: UnifiedTreeNode, request: LiveRequest) -> None:
    """Keep and release what ``request`` asks for of the path to ``node``, which was just stamped."""
    for wish in request.ranges:
        if wish.releases:
            _release(tree, node, request, wish)
        elif wish.protects and {DEVICE, HOST} & set(wish.tiers):
            _keep(tree, node, request, wish)


def _keep(
    tree: NodeMetadataCore, node: UnifiedTreeNode, request: LiveRequest, wish: Retention
) -> None:
    """Keep the path down to the end of the range: what is above it goes with it."""
    while node is not tree.root_node and wish.end is not None:
        if node.canopy.offset + node.canopy.length <= wish.end:
            break
        node = node.parent
    if node is not tree.root_node:
        until = request.time + min(wish.duration_s, MAX_KEEP_S)
        tree.keep_path(node, until, request.tenant)


def _release(
    tree: NodeMetadataCore, node: UnifiedTreeNode, request: LiveRequest, wish: Retention
) -> None:
    while node is not tree.root_node:
        leaf = node.canopy
        inside = wish.covers(leaf.offset, leaf.offset + leaf.length, request.prompt_tokens)
        if inside and leaf.tenant == request.tenant and not leaf.shared:
            tree.readmit(node)
            leaf.over = True
        node = node.parent
