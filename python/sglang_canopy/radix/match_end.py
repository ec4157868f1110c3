"""Positions where a lookup can end, in trees with sliding windows or recurrent states.

A request continues from a node only if the node has the state at its end (Mamba, linear attention)
and a whole window of KV before it (sliding windows), on the device or on the host. Full KV beyond
the last such position cannot be used until a request has computed the missing state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.components import TreeComponent
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import (
        UnifiedTreeCore,
        UnifiedTreeNode,
    )


def can_end_after(core: UnifiedTreeCore, node: UnifiedTreeNode, tokens: int) -> bool:
    """Return whether a lookup can end after ``tokens`` (1 or more) of ``node``."""
    by_type = core.components_by_type
    if ComponentType.MAMBA in by_type and (
        tokens < len(node.key) or not _has(node, ComponentType.MAMBA)
    ):
        return False
    swa = by_type.get(ComponentType.SWA)
    return swa is None or _whole_window(core, swa, node, tokens)


def _has(node: UnifiedTreeNode, kind: ComponentType) -> bool:
    """Apply SGLang's rule for a lookup: a copy on the host is enough."""
    data = node.component_data[kind]
    return data.value is not None or data.host_value is not None


def _whole_window(
    core: UnifiedTreeCore, swa: TreeComponent, node: UnifiedTreeNode, tokens: int
) -> bool:
    if not swa.gates_prefix_match:
        return True
    lacking = swa.sliding_window_size
    while node is not core.root_node:
        if not _has(node, ComponentType.SWA):
            return False
        lacking -= tokens
        if lacking <= 0:
            return True
        node = node.parent
        tokens = len(node.key) if node.key is not None else 0
    return True
