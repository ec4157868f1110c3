import pytest

from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import make_policy
from support.radix_cases import play


def test_leaves_used_once_go_before_leaves_used_twice():
    paths = [(1,), (1,), (2,), (3,), (4,), (5,)]
    assert play("slru", 3, paths, protected_share=1.0) == [(2,), (3,)]


def test_protected_leaves_go_by_recency_when_no_other_is_left():
    paths = [(1,), (2,), (2,), (1,), (3,), (3,), (4,)]
    assert play("slru", 2, paths, protected_share=1.0) == [(2,), (1,)]


def test_the_least_recent_protected_leaf_is_demoted_beyond_the_share():
    # 1 and 2 are protected: 2 of 3 evictable tokens runs, above half, so 1 is demoted when 2
    # is protected; it then stands behind 3 in probation, as the younger of the two.
    paths = [(3,), (1,), (1,), (2,), (2,), (4,), (5,)]
    assert play("slru", 3, paths, protected_share=0.5) == [(3,), (1,)]


def test_a_demoted_leaf_that_is_used_is_protected_again():
    paths = [(3,), (1,), (1,), (2,), (2,), (1,), (4,), (5,)]
    assert play("slru", 3, paths, protected_share=0.5) == [(3,), (2,)]


def test_options_are_checked():
    with pytest.raises(CanopyError, match="protected_share"):
        make_policy("slru", {"protected_share": 1.5})
    with pytest.raises(CanopyError, match="protected_hits"):
        make_policy("slru", {"protected_hits": 0})
