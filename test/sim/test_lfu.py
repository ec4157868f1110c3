from support.radix_cases import play


def test_evicts_the_leaf_with_fewest_uses():
    assert play("lfu", 3, [(1,), (1,), (2,), (3,), (3,), (4,)]) == [(2,)]


def test_equal_uses_go_by_recency():
    assert play("lfu", 2, [(1,), (2,), (1,), (2,), (3,)]) == [(1,)]


def test_a_new_leaf_goes_before_an_old_favourite():
    assert play("lfu", 2, [(1,), (1,), (2,), (3,), (4,)]) == [(2,), (3,)]


def test_a_shared_prefix_counts_every_request_through_it():
    # 1 is used three times: its children go first, whatever their age.
    paths = [(1, 2), (1, 3), (1, 4), (5,), (5,), (6,), (7,), (8,)]
    assert play("lfu", 5, paths) == [(2,), (3,), (4,)]
