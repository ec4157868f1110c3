"""The answer to each question, on traces whose answers are worked out by hand."""

import math
import random

import numpy as np
import pytest
from published import compare

from canopy_lab.characterize.capacity import lru_blocks_for, lru_points, measure_capacity
from canopy_lab.characterize.hits import measure_ideal_hits
from canopy_lab.characterize.observe import FINE_BINS, observe
from canopy_lab.characterize.reuse_time import measure_reuse_times
from canopy_lab.characterize.skew import concentration, measure_skew
from canopy_lab.characterize.turns import measure_turns
from canopy_lab.sim.stack import lru_curve
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError
from support.tiny_traces import THREE_CONVERSATIONS, request_of


def test_ideal_hits_are_split_between_first_and_later_turns() -> None:
    hits = measure_ideal_hits(observe(THREE_CONVERSATIONS), windows=2)
    assert hits.block_hit_ratio == pytest.approx(6 / 12)
    assert hits.token_hit_ratio == pytest.approx(6 / 12)
    assert hits.requests_with_a_hit == pytest.approx(3 / 5)
    first, later_turns = hits.turns
    assert (first.requests, first.hits, first.hit_ratio) == pytest.approx((3 / 5, 1 / 6, 1 / 5))
    assert (later_turns.blocks, later_turns.hits) == pytest.approx((7 / 12, 5 / 6))
    assert [kind.name for kind in hits.kinds] == ["text", "file"]
    assert hits.window_hit_ratio == pytest.approx((3 / 8, 3 / 4))


def test_hits_of_a_partial_block_count_its_tokens_only() -> None:
    trace = [request_of(0, [1, 2], input_tokens=15), request_of(1, [1, 2], input_tokens=15)]
    assert measure_ideal_hits(observe(trace)).token_hit_ratio == pytest.approx(0.5)


def test_concentration_has_the_share_of_each_owner() -> None:
    skewed = concentration(np.array([90, 10, 0, 0, 0, 0, 0, 0, 0, 0]))
    assert skewed.top_tenth == pytest.approx(0.9)
    assert skewed.owners_of_90 == pytest.approx(0.1)
    even = concentration(np.ones(1000))
    assert even.top_tenth == pytest.approx(0.1)
    assert even.owners_of_90 == pytest.approx(0.9)


def test_the_concentration_of_nothing_is_0() -> None:
    assert concentration(np.zeros(5)).top_tenth == 0.0


def test_cross_hits_need_user_ids() -> None:
    with_users = measure_skew(observe(THREE_CONVERSATIONS))
    assert with_users.cross_user_hits == pytest.approx(2 / 6)
    assert with_users.cross_conversation_hits == pytest.approx(2 / 6)
    no_users = measure_skew(observe([request_of(0, [1]), request_of(1, [1])]))
    assert no_users.cross_user_hits is no_users.user_hits is no_users.conversation_hits is None


def test_next_turn_probabilities_by_category() -> None:
    trace = []
    for i in range(40):  # 40 first turns, half of them continued 10 s later
        trace.append(request_of(20.0 * i, [100 + i], conversation=str(i)))
        if i % 2 == 0:
            trace.append(request_of(20.0 * i + 10, [100 + i, 200 + i], conversation=str(i), turn=2))
    next_turns = measure_turns(observe(trace), windows=1)
    assert next_turns is not None
    assert math.isnan(next_turns.drift), "one window has no change"
    assert next_turns.conversations == 40
    assert next_turns.first_turn_share == pytest.approx(40 / 60)
    assert (next_turns.p50, next_turns.longest) == (1, 2)
    assert next_turns.pause_p50_s == pytest.approx(10.0)
    rows = {row.name: row for row in next_turns.next_turn}
    assert rows["text-1"].probability == pytest.approx(0.5, abs=0.02)
    assert rows["text-2"].probability == 0.0
    assert math.isnan(rows["text-2"].over_time[0]) or rows["text-2"].over_time[0] == 0.0


def test_requests_near_the_end_do_not_count_in_next_turns() -> None:
    """The last request would be followed after the end, so it does not count as not followed."""
    trace = [request_of(10.0 * i, [i], conversation=str(i // 2), turn=i % 2 + 1) for i in range(41)]
    next_turns = measure_turns(observe(trace))
    assert next_turns is not None
    assert next_turns.first_next == 1.0


def test_a_trace_of_first_turns_has_no_answer_about_turns() -> None:
    trace = [request_of(0, [1], conversation="a"), request_of(1, [2], conversation="b")]
    assert measure_turns(observe(trace)) is None


def reuse_trace(ages_s: list[float], unused_blocks: int) -> list[TraceRequest]:
    """Blocks used twice, the second time after ``ages``; and ``unused`` ones used once."""
    events = [(float(i), i) for i in range(len(ages_s) + unused_blocks)]
    events += [(i + age_s, i) for i, age_s in enumerate(ages_s)]
    return [request_of(time_s, [block]) for time_s, block in sorted(events)]


def test_reuse_quantiles_and_means_are_correct() -> None:
    ages_s = [10.0] * 50 + [100.0] * 50
    reuse = measure_reuse_times(observe(reuse_trace(ages_s, 0)))
    assert reuse.all.reuses == 100
    assert reuse.all.mean_s == pytest.approx(55.0)
    assert reuse.all.p50_s == pytest.approx(10.0, rel=0.1)
    assert reuse.all.p90_s == pytest.approx(100.0, rel=0.1)
    assert dict(reuse.within)[60.0] == pytest.approx(0.5, abs=0.02)


def test_blocks_still_waiting_at_the_end_are_censored() -> None:
    """Half are used again after 10 s and never later: one in three uses is followed. The last uses cannot
    have been followed yet, so they do not lower the share."""
    rng = random.Random(1)
    ages_s = [10.0 if rng.random() < 0.5 else 1e9 for _ in range(2000)]
    trace = [use for use in reuse_trace(ages_s, 0) if use.time_s < 2000.0]
    reuse = measure_reuse_times(observe(trace)).all
    assert reuse.reuses + reuse.waiting == len(trace)
    assert reuse.reused_by_end == pytest.approx(1 / 3, abs=0.02)
    assert list(reuse.observed) == sorted(reuse.observed)


def test_a_trace_without_reuse_has_no_reuse_times() -> None:
    reuse = measure_reuse_times(observe([request_of(i, [i]) for i in range(5)]))
    assert reuse.all.reuses == 0
    assert reuse.all.reused_by_end == 0.0
    assert len(reuse.categories) == 0
    assert FINE_BINS > len(reuse.all.age_s) > 0


def test_the_capacity_that_a_loop_needs_is_its_length() -> None:
    """Three blocks in turn: LRU needs all three, and so does a cache with hindsight."""
    trace = [request_of(float(i), [i % 3]) for i in range(30)]
    counts, lru = observe(trace), lru_curve(trace)
    capacity = measure_capacity(counts, lru, 100)
    assert capacity.ideal_hit_ratio == pytest.approx(27 / 30)
    assert dict(capacity.lru_for_share)[0.5] == 3
    assert capacity.live_peak == 3
    capacities, hit_ratio = lru_points(lru)
    assert hit_ratio[list(capacities).index(3)] == pytest.approx(27 / 30)


def test_capacity_counts_only_reused_blocks() -> None:
    trace = [request_of(0, [1]), request_of(1, [2]), request_of(2, [3]), request_of(3, [1])]
    counts, lru = observe(trace), lru_curve(trace)
    capacity = measure_capacity(counts, lru, 1)
    assert capacity.live_peak == 1
    assert lru_blocks_for(lru, 1.0) == 3


def test_published_numbers_are_compared_and_missing_ones_listed() -> None:
    rows = {row.name: row for row in compare("trace-a", observe(THREE_CONVERSATIONS))}
    assert rows["ideal block hit ratio"].value == pytest.approx(0.5)
    assert rows["ideal block hit ratio"].is_met is False
    assert rows["first turns, of requests"].value == pytest.approx(0.6)
    assert rows["search, of requests"].value is None
    assert rows["search, of requests"].is_met is None
    with pytest.raises(CanopyError, match="trace-a, trace-b"):
        compare("trace-z", observe(THREE_CONVERSATIONS))
