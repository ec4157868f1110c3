"""Tokens that are kept, and charged, until a time."""

from sglang_canopy.policy.keep import Keeps
from sglang_canopy.records import Leaf


def test_both_parts_of_a_split_leaf_are_kept_and_charged_until_the_end() -> None:
    keeps, leaf, head = Keeps(1000), Leaf(0, 100), Leaf(0, 40)
    keeps.grant([leaf], 10.0, "a", 0.0)
    head.keep_until, leaf.offset, leaf.length = leaf.keep_until, 40, 60
    keeps.split(leaf, head)
    keeps.check([head, leaf])
    keeps.expire(9.0)
    assert keeps.budget.by_tenant == {"a": 100}
    keeps.expire(10.0)
    assert keeps.budget.by_tenant == {}
