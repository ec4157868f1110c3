import pytest

from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import make_policy
from support.radix_cases import play


def test_frequency_first():
    assert play("gdfs", 3, [(1,), (1,), (2,), (3,), (4,)], cost="linear") == [(2,)]


def test_the_clock_ages_an_old_favourite():
    # 1 has value 3. Each eviction lifts the clock, and with it new blocks: 1, 1, 2, 2, ...
    paths = [(1,), (1,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)]
    cuts = play("gdfs", 2, paths, cost="linear")
    # values: 2 -> 1 (clock 1), 3 -> 2 (clock 2), 4 -> 3: ties with 1, which is older.
    assert cuts == [(2,), (3,), (1,), (4,), (5,)]


def test_deep_segments_are_worth_more_a_token():
    # 9 was used as often and later, but is shallow; (1, 2) reaches depth 20 tokens.
    paths = [(1, 2), (9,), (3,)]
    assert play("gdfs", 3, paths, attention_tokens=10.0) == [(9,)]
    assert play("gdfs", 3, paths, cost="linear") == [(2,)]


def test_a_parent_that_surfaces_keeps_the_clock_of_its_last_use():
    # 1 was last used at clock 0 (value 2); 9 at clock 0 thrice (value 3). When 2 and 3 below 1
    # have gone (clock 1), 1 surfaces with value 2, not 3.
    paths = [(1, 2), (1, 3), (9,), (9,), (9,), (5,), (6,), (7,), (8,)]
    assert play("gdfs", 4, paths, cost="linear") == [(2,), (3,), (1,), (5,)]


def test_options_are_checked():
    with pytest.raises(CanopyError, match="linear, quadratic"):
        make_policy("gdfs", {"cost": "cubic"})
    with pytest.raises(CanopyError, match="attention_tokens"):
        make_policy("gdfs", {"attention_tokens": 0})
