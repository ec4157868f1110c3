"""Recounts of a live tree's data about its leaves, after any operation."""

from typing import Any

from sglang_canopy.policy.floored import Floored
from support.tree_recount import recount_awaited, recount_keeps


def recount_leaves(leaves: Any, truth: set[Any]) -> None:
    """Each evictable node of one tier is in exactly one place: the policy, ``pending`` or
    ``unusable``. A floored policy ranks the same leaves in both of its orders."""
    admitted = [leaf.node for leaf in leaves.policy.leaves()]
    assert len(admitted) == len(set(admitted)), "a leaf was admitted twice"
    unusable = [leaf.node for leaf in leaves.unusable]
    parts = [set(admitted), set(leaves.pending), set(unusable)]
    assert set().union(*parts) == truth
    assert sum(map(len, parts)) == len(truth), "a leaf is in two places"
    if isinstance(leaves.policy, Floored):
        assert set(leaves.policy.main.leaves()) == set(leaves.policy.leaves())


def recount_protected(core: Any) -> None:
    """Check that protected tokens are charged to a budget."""
    now, protected = core.clock.now, core.protected
    nodes = [node.canopy for node in core._node_arena.values() if node is not core.root_node]
    recount_keeps(protected.keeps, nodes)
    kept = [leaf for leaf in nodes if leaf.keep_until is not None and leaf.keep_until > now]
    assert sum(leaf.length for leaf in kept) <= protected.keeps.budget.tokens
    recount_awaited(protected.awaited, nodes)
