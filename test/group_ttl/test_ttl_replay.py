"""The vectorised replay of TTLs against a block-by-block one, and small cases by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canopy_lab.group_ttl.paths import segments_of
from canopy_lab.group_ttl.replay import fixed_ttls, simulate_ttl
from sglang_canopy.errors import CanopyError
from sglang_canopy.ttl.table import Group, TTLTable
from support.ttl_cases import BLOCK_TOKENS, paths_from_uses, requests, slow_replay


def fixed_ttl_schedule(ttl_s: float) -> list[tuple[float, TTLTable]]:
    return [(0.0, TTLTable(residual_ttl_s=ttl_s))]


def test_a_page_is_hit_until_its_ttl_is_over() -> None:
    log = paths_from_uses([(0.0, (1, 2), "a"), (4.0, (1, 3), "a"), (10.0, (1, 2), "a")])
    # Block 1 is used again after 4 and 6 seconds, block 2 after 10.
    result = simulate_ttl(log, fixed_ttl_schedule(5.0))
    assert (result.tokens, result.hits) == (6 * BLOCK_TOKENS, BLOCK_TOKENS)
    assert result.mean_tokens == pytest.approx(BLOCK_TOKENS * (9 + 5 + 5) / 10)
    assert simulate_ttl(log, fixed_ttl_schedule(6.0)).hits == 2 * BLOCK_TOKENS
    assert simulate_ttl(log, fixed_ttl_schedule(math.inf)).hits == 3 * BLOCK_TOKENS
    assert simulate_ttl(log, fixed_ttl_schedule(0.0)).mean_tokens == 0.0


def test_requests_before_the_measured_time_only_fill_the_disk() -> None:
    log = paths_from_uses([(0.0, (1,), "a"), (4.0, (1,), "a"), (8.0, (1,), "a")])
    result = simulate_ttl(log, fixed_ttl_schedule(5.0), since_s=4.0)
    assert result.tokens == result.hits == 2 * result.mean_tokens == 2 * BLOCK_TOKENS


def test_a_schedule_out_of_order_is_refused() -> None:
    log = paths_from_uses([(0.0, (1,), "a")])
    with pytest.raises(CanopyError, match="in order of time"):
        simulate_ttl(log, [(5.0, TTLTable()), (1.0, TTLTable())])
    with pytest.raises(CanopyError, match="in order of time"):
        simulate_ttl(log, [])


TTLS_S = st.sampled_from([0.0, 0.5, 1.0, 2.0, 5.0, 20.0, math.inf])


@st.composite
def tables(draw: st.DrawFn) -> TTLTable:
    roots = draw(st.lists(st.integers(1, 12), unique=True, max_size=4))
    categories = draw(st.dictionaries(st.sampled_from(["chat", "api"]), TTLS_S))
    groups = tuple(Group(root, draw(TTLS_S)) for root in roots)
    return TTLTable(groups, draw(TTLS_S), categories=categories)


@given(requests(), tables(), tables(), st.sampled_from([0.0, 1.0, 4.0]))
def test_the_replay_agrees_with_one_block_by_block(drawn_requests, table, later_table, switch_s):
    schedule = [(0.0, table), (switch_s, later_table)]
    start_s = drawn_requests[0].time_s
    drawn_requests = [use._replace(time_s=use.time_s - start_s) for use in drawn_requests]
    result = simulate_ttl(paths_from_uses(drawn_requests), schedule)
    tokens, hits, mean_tokens = slow_replay(drawn_requests, schedule)
    assert (result.tokens, result.hits) == (tokens, hits)
    assert result.mean_tokens == pytest.approx(mean_tokens, abs=1e-3)


@given(requests(), st.lists(TTLS_S, min_size=1, max_size=3), st.sampled_from([0.0, 2.0, 5.0]))
def test_the_sweep_of_fixed_ttls_is_the_same_replay(drawn_requests, ttls_s, since_s):
    log = paths_from_uses(drawn_requests)
    for ttl_s, swept in zip(ttls_s, fixed_ttls(segments_of(log), ttls_s, since_s)):
        result = simulate_ttl(log, fixed_ttl_schedule(ttl_s), since_s)
        assert (swept.tokens, swept.hits) == (result.tokens, result.hits)
        assert swept.mean_tokens == pytest.approx(result.mean_tokens, abs=1e-3)


def test_a_partial_last_block_counts_its_tokens() -> None:
    log = paths_from_uses([(0.0, (1, 2), "a"), (1.0, (1, 2), "a")], cut_tokens=BLOCK_TOKENS - 3)
    result = simulate_ttl(log, fixed_ttl_schedule(1.0))
    assert (result.tokens, result.hits) == (2 * (BLOCK_TOKENS + 3), BLOCK_TOKENS + 3)


@given(requests(max_requests=30), st.sampled_from([1.0, 4.0]))
def test_paths_until_a_time_are_those_of_the_earlier_requests(drawn_requests, duration_s):
    until_s = drawn_requests[0].time_s + duration_s
    earlier = paths_from_uses([use for use in drawn_requests if use.time_s <= until_s])
    ttls_s = [0.0, 1.0, 5.0, 100.0]
    cut_log, earlier_log = (
        fixed_ttls(segments_of(log), ttls_s)
        for log in (paths_from_uses(drawn_requests).until(earlier.end_s), earlier)
    )
    assert cut_log == earlier_log
