import pytest

from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import make_policy
from support.radix_cases import play


def test_short_conversations_go_first_however_recent():
    paths = [(1, 2, 3), (4,), (5,), (6,)]
    assert play("threshold-lru", 5, paths, threshold_tokens=25) == [(4,)]


def test_among_equals_it_is_lru():
    paths = [(1, 2, 3), (4, 5, 6), (7,)]
    assert play("threshold-lru", 6, paths, threshold_tokens=25) == [(3,)]


def test_a_prefix_counts_with_the_longest_conversation_through_it():
    # 1 was last used alone (11 tokens) but was the head of (1, 2, 3): when it becomes a leaf, the
    # younger and shorter 8 is still evicted before it.
    paths = [(1, 2, 3), (1,), (9,), (4, 5, 6), (8,), (7,)]
    assert play("threshold-lru", 5, paths, threshold_tokens=25) == [(9,), (3,), (2,), (8,)]


def test_the_output_counts_as_length():
    paths = [(1, 2), (4,), (5,)]
    assert play("threshold-lru", 3, paths, output_tokens=5, threshold_tokens=25) == [(4,)]


def test_options_are_checked():
    with pytest.raises(CanopyError, match="threshold_tokens"):
        make_policy("threshold-lru", {"threshold_tokens": -1})
