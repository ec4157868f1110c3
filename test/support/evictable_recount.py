"""Recounts of a live tree's leaves, nodes and budgets, after any operation."""

from typing import Any

from sglang_canopy.policy.floored import FlooredPolicy
from sglang_canopy.radix.core import CanopyTreeCore
from support.tree_recount import recount_awaited, recount_keeps


def recount_core(core: Any) -> None:
    """Compare the leaves of both tiers with the evictable nodes of SGLang's tree. For Canopy's core, recount
    what the policies rank, the nodes' metadata, and the protected tokens."""
    nodes = [node for node in core._node_arena.values() if node is not core.root_node]
    for leaves, is_leaf in (
        (core.evictable_device_leaves, core._is_device_leaf),
        (core.evictable_host_leaves, core._is_host_leaf),
    ):
        expected_nodes = {node for node in nodes if is_leaf(node)}
        assert set(leaves) == expected_nodes, (len(leaves), len(expected_nodes))
        if isinstance(core, CanopyTreeCore):
            _recount_leaves(leaves, expected_nodes)
    if isinstance(core, CanopyTreeCore):
        for node in nodes:
            _recount_node(node)
        _recount_protected(core, [node.canopy for node in nodes])


def _recount_leaves(leaves: Any, expected_nodes: set[Any]) -> None:
    """Each evictable node of one tier is in exactly one place: the policy, ``pending`` or
    ``unusable``. A floored policy ranks the same leaves in both of its orders."""
    ranked = [leaf.node for leaf in leaves.policy.leaves()]
    assert len(ranked) == len(set(ranked)), "a policy ranks a leaf twice"
    unusable = [leaf.node for leaf in leaves.unusable_leaves]
    places = [set(ranked), set(leaves.pending), set(unusable)]
    assert set().union(*places) == expected_nodes
    assert sum(map(len, places)) == len(expected_nodes), "a leaf is in two places"
    if isinstance(leaves.policy, FlooredPolicy):
        assert set(leaves.policy.main_policy.leaves()) == set(leaves.policy.leaves())


def _recount_node(node: Any) -> None:
    leaf = node.canopy
    assert leaf.node is node
    if leaf.length:
        assert leaf.length == len(node.key)
        assert leaf.offset == node.parent.canopy.offset + node.parent.canopy.length


def _recount_protected(core: Any, leaves: list[Any]) -> None:
    """Check that protected tokens are charged to a budget."""
    now, protected = core.clock.now, core.protected
    recount_keeps(protected.keeps, leaves)
    kept_leaves = [leaf for leaf in leaves if leaf.keep_until is not None and leaf.keep_until > now]
    assert sum(leaf.length for leaf in kept_leaves) <= protected.keeps.budget.used_tokens
    recount_awaited(protected.awaited, leaves)
