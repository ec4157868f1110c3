"""TTL tables: the TTL of a page, and refused tables."""

import json
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.errors import CanopyError
from sglang_canopy.ttl.table import MAX_GROUPS, RESIDUAL, Group, TTLTable

TABLE = TTLTable(
    (Group(10, 5.0), Group(20, math.inf, "docs"), Group(12, 0.0)),
    residual_ttl_s=60.0,
    categories={"api": 3600.0, "chat|end": 1.0},
)


def test_the_deepest_listed_root_on_the_path_is_the_group() -> None:
    assert TABLE.group_of([10, 11, 12, 13]) == 2
    assert TABLE.group_of([10, 11]) == 0
    assert TABLE.group_of([1, 20]) == 1
    assert TABLE.group_of([1, 2]) == TABLE.group_of([]) == RESIDUAL


def test_a_block_above_a_root_is_not_in_its_group() -> None:
    assert TABLE.groups_along([9, 10, 11, 12, 13]) == [RESIDUAL, 0, 0, 2, 2]


def test_the_request_precedes_group_category_and_residual() -> None:
    assert TABLE.ttl_s(0, "api", own_ttl_s=7.0) == 7.0
    assert TABLE.ttl_s(0, "api") == 5.0
    assert TABLE.ttl_s(RESIDUAL, "api") == 3600.0
    assert TABLE.ttl_s(RESIDUAL, "other") == TABLE.ttl_s(RESIDUAL) == 60.0


def test_a_label_a_policy_refined_is_found_by_its_coarser_names() -> None:
    assert TABLE.ttl_s(RESIDUAL, "api|-|turn1|out<64") == 3600.0
    assert TABLE.ttl_s(RESIDUAL, "chat|end|turn1") == 1.0
    assert TABLE.ttl_s(RESIDUAL, "chat|tool") == 60.0


def test_an_index_of_an_older_table_counts_as_residual() -> None:
    assert TABLE.ttl_s(99) == 60.0


ROOTS = st.integers(0, 2**64 - 1)
TTLS_S = st.one_of(st.just(math.inf), st.floats(0, 1e9))


@given(
    st.dictionaries(ROOTS, TTLS_S, max_size=8),
    TTLS_S,
    st.dictionaries(st.text(min_size=1, max_size=20), TTLS_S, max_size=4),
)
def test_json_and_pickle_restore_the_same_table(groups, residual_ttl_s, categories):
    listed_groups = tuple(Group(root, ttl_s) for root, ttl_s in groups.items())
    table = TTLTable(listed_groups, residual_ttl_s, categories=categories)
    text = json.dumps(table.to_json(), allow_nan=False)
    assert TTLTable.from_json(json.loads(text)) == table
    assert pickle.loads(pickle.dumps(table)).group_of(list(groups)) == table.group_of(list(groups))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "JSON object"),
        ({"group": []}, "allowed keys: groups"),
        ({"groups": {}}, "must be a list"),
        ({"groups": [{"root": 1}]}, "no 'ttl_s'"),
        ({"groups": [{"root": 1, "ttl_s": -1}]}, "0 or more"),
        ({"groups": [{"root": 1, "ttl_s": math.nan}]}, "0 or more"),
        ({"groups": [{"root": 1, "ttl_s": True}]}, "0 or more"),
        ({"groups": [{"root": 1, "ttl_s": "60"}]}, "0 or more"),
        ({"groups": [{"root": "zz", "ttl_s": 1}]}, "hexadecimal"),
        ({"groups": [{"root": -1, "ttl_s": 1}]}, "64 bits"),
        ({"groups": [{"root": 1.0, "ttl_s": 1}]}, "64 bits"),
        ({"groups": [{"root": 2**64, "ttl_s": 1}]}, "64 bits"),
        ({"groups": [{"root": 1, "ttl_s": 1, "tll": 2}]}, "unknown key 'tll'"),
        ({"groups": [{"root": 1, "ttl_s": 1}, {"root": "0x1", "ttl_s": 2}]}, "same root"),
        ({"groups": [{"root": 1, "ttl_s": 1, "name": 3}]}, "string"),
        ({"groups": [None] * (MAX_GROUPS + 1)}, f"at most {MAX_GROUPS}"),
        ({"residual_ttl_s": -0.5}, "0 or more"),
        ({"block_tokens": 0}, "1 to 65536"),
        ({"block_tokens": 16.0}, "1 to 65536"),
        ({"hash": "md5"}, "one of xxh3-chained, trace"),
        ({"categories": ["api"]}, "categories must be"),
        ({"categories": {"": 5}}, "1 to 128"),
        ({"categories": {"api": -5}}, "category 'api'"),
    ],
)
def test_a_bad_table_is_refused_with_the_allowed_values(table: Any, message: str) -> None:
    with pytest.raises(CanopyError, match="TTL table") as error:
        TTLTable.from_json(table)
    assert message in str(error.value)
