from support.radix_cases import play


def test_evicts_the_least_recent_leaf():
    assert play("lru", 3, [(1,), (2,), (3,), (1,), (4,)]) == [(2,)]


def test_a_parent_goes_only_after_its_children_and_with_its_own_age():
    # (1, 2), then (1, 3): node 1 is as young as (3). The order of eviction is 2, 9, 3, 1.
    paths = [(1, 2), (9,), (1, 3), (5,), (6,), (7,), (8,)]
    assert play("lru", 4, paths) == [(2,), (9,), (3,), (1,)]


def test_cuts_the_deepest_blocks_first():
    assert play("lru", 3, [(1, 2, 3), (4,), (5,)]) == [(3,), (2,)]
