"""Recounts of a simulated tree, and of the tokens that budgets are charged for."""

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

from sglang_canopy.policy.awaited import AwaitedPaths
from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.policy.keep import Keeps
from sglang_canopy.records import Leaf


def recount(tree: RadixTree) -> None:
    """Fail if a field of the tree differs from a recount of its nodes."""
    used_blocks, evictable_ids = 0, set()
    recount_keeps(tree.keeps, tree.nodes())
    for node in tree.nodes():
        parent, block_tokens = node.parent, tree.block_tokens
        assert parent is not None, f"node {node.blocks[:4]} has no parent"
        assert node.blocks, "an empty node stayed in the tree"
        assert parent.children.get(node.blocks[0]) is node, f"misfiled child {node.blocks[:4]}"
        assert node.length == len(node.blocks) * block_tokens, f"length of {node.blocks[:4]}"
        assert node.offset == parent.offset + parent.length, f"offset of {node.blocks[:4]}"
        assert node.last_access <= parent.last_access or parent is tree.root, (
            f"{node.blocks[:4]} was used at {node.last_access}, its parent only at "
            f"{parent.last_access}"
        )
        if node.hits == 0:  # its request is in flight
            assert node.locks or node.children, f"{node.blocks[:4]} was never marked used"
        used_blocks += len(node.blocks)
        if not node.children and not node.locks:
            evictable_ids.add(id(node))
    assert used_blocks == tree.used_blocks, f"{used_blocks} blocks, {tree.used_blocks} counted"
    assert used_blocks <= tree.capacity_blocks, f"{used_blocks} of {tree.capacity_blocks} blocks"
    ranked_ids = [id(leaf) for leaf in tree.policy.leaves()]
    assert len(ranked_ids) == len(set(ranked_ids)), "the policy ranks a leaf twice"
    assert set(ranked_ids) == evictable_ids, (
        f"the policy ranks {len(ranked_ids)} leaves, {len(evictable_ids)} are evictable"
    )


def recount_each_access(monkeypatch: Any) -> None:
    """Recount every simulated tree after each of its requests."""
    original_access = RadixTree.access

    def access_and_recount(tree: RadixTree, request: Any) -> int:
        hit_tokens = original_access(tree, request)
        recount(tree)
        return hit_tokens

    monkeypatch.setattr(RadixTree, "access", access_and_recount)


def recount_keeps(keeps: Keeps, leaves: Iterable[Leaf]) -> None:
    """Fail if the budget of keeps differs from a recount of the tree's nodes."""
    current_leaves = set(leaves)
    tokens_by_tenant: Counter[Hashable] = Counter()
    for leaf, (tenant, tokens) in keeps._charges.items():
        assert leaf in current_leaves, "a removed node is charged"
        assert tokens == leaf.length, f"{tokens} tokens charged for a node of {leaf.length}"
        tokens_by_tenant[tenant] += tokens
    assert tokens_by_tenant == keeps.budget.tokens_by_tenant, (
        tokens_by_tenant,
        keeps.budget.tokens_by_tenant,
    )
    assert keeps.budget.used_tokens == tokens_by_tenant.total()


def recount_awaited(awaited: AwaitedPaths, leaves: Iterable[Leaf]) -> None:
    """Fail if the budget of waiting requests' prefixes differs from a recount of the tree's nodes."""
    current_leaves = set(leaves)
    assert awaited._charges.keys() <= current_leaves, "a removed node is charged"
    protected = {leaf for leaf in current_leaves if leaf.awaited_until is not None}
    assert protected == awaited._charges.keys(), "a node is protected and not charged"
    charged_tokens = sum(tokens for _, _, tokens in awaited._charges.values())
    used_tokens = awaited.budget.used_tokens
    assert charged_tokens == used_tokens, (charged_tokens, used_tokens)
    protected_tokens = sum(leaf.length for leaf in protected)
    assert protected_tokens <= charged_tokens, (protected_tokens, charged_tokens)
