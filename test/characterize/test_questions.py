"""Each question, on traces whose answer a hand can work out."""

import math
import random

import numpy as np
import pytest
from published import compare

from canopy_lab.characterize.capacity import blocks_for, capacity, lru_points
from canopy_lab.characterize.hits import ideal_hits
from canopy_lab.characterize.observe import FINE_BINS, observe
from canopy_lab.characterize.reuse_time import reuse_times
from canopy_lab.characterize.skew import concentration, skew
from canopy_lab.characterize.turns import turns
from canopy_lab.sim.stack import lru_curve
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError
from support.tiny_traces import TWO_TALKS, ask


def test_ideal_hits_are_split_between_first_and_later_turns() -> None:
    h = ideal_hits(observe(TWO_TALKS), windows=2)
    assert h.block_hit_ratio == pytest.approx(6 / 12)
    assert h.token_hit_ratio == pytest.approx(6 / 12)
    assert h.requests_with_a_hit == pytest.approx(3 / 5)
    first, later = h.turns
    assert (first.requests, first.hits, first.hit_ratio) == pytest.approx((3 / 5, 1 / 6, 1 / 5))
    assert (later.blocks, later.hits) == pytest.approx((7 / 12, 5 / 6))
    assert [k.name for k in h.kinds] == ["text", "file"]
    assert h.window_hit_ratio == pytest.approx((3 / 8, 3 / 4))


def test_hits_of_a_partial_block_count_its_tokens_only() -> None:
    trace = [ask(0, [1, 2], input_tokens=15), ask(1, [1, 2], input_tokens=15)]
    assert ideal_hits(observe(trace)).token_hit_ratio == pytest.approx(0.5)


def test_concentration_has_the_share_of_each_owner() -> None:
    c = concentration(np.array([90, 10, 0, 0, 0, 0, 0, 0, 0, 0]))
    assert c.top_tenth == pytest.approx(0.9)
    assert c.owners_of_90 == pytest.approx(0.1)
    even = concentration(np.ones(1000))
    assert even.top_tenth == pytest.approx(0.1)
    assert even.owners_of_90 == pytest.approx(0.9)


def test_nothing_to_hold_is_not_a_division_by_zero() -> None:
    assert concentration(np.zeros(5)).top_tenth == 0.0


def test_cross_hits_need_user_ids() -> None:
    s = skew(observe(TWO_TALKS))
    assert s.cross_user_hits == pytest.approx(2 / 6)
    assert s.cross_conversation_hits == pytest.approx(2 / 6)
    bare = skew(observe([ask(0, [1]), ask(1, [1])]))
    assert bare.cross_user_hits is bare.user_hits is bare.conversation_hits is None


def test_next_turn_probabilities_by_category() -> None:
    trace = []
    for i in range(40):  # 40 first turns, half of them continued 10 s later
        trace.append(ask(20.0 * i, [100 + i], talk=str(i)))
        if i % 2 == 0:
            trace.append(ask(20.0 * i + 10, [100 + i, 200 + i], talk=str(i), turn=2))
    t = turns(observe(trace), windows=1)
    assert t is not None
    assert t.conversations == 40
    assert t.first_turn_share == pytest.approx(40 / 60)
    assert (t.p50, t.longest) == (1, 2)
    assert t.pause_p50_s == pytest.approx(10.0)
    rows = {r.name: r for r in t.next_turn}
    assert rows["text-1"].probability == pytest.approx(0.5, abs=0.02)
    assert rows["text-2"].probability == 0.0
    assert math.isnan(rows["text-2"].over_time[0]) or rows["text-2"].over_time[0] == 0.0


def test_requests_near_the_end_do_not_count_in_next_turns() -> None:
    """The last request would be followed after the end, so it does not count as not followed."""
    trace = [ask(10.0 * i, [i], talk=str(i // 2), turn=i % 2 + 1) for i in range(41)]
    t = turns(observe(trace))
    assert t is not None
    assert t.first_next == 1.0


def test_a_trace_of_first_turns_has_no_turns_to_speak_of() -> None:
    assert turns(observe([ask(0, [1], talk="a"), ask(1, [2], talk="b")])) is None


def reused(ages: list[float], never: int) -> list[TraceRequest]:
    """Blocks used twice, the second time after ``ages``; and ``never`` ones used once."""
    events = [(float(i), i) for i in range(len(ages) + never)]
    events += [(i + age, i) for i, age in enumerate(ages)]
    return [ask(time_s, [block]) for time_s, block in sorted(events)]


def test_reuse_quantiles_and_means_are_correct() -> None:
    ages = [10.0] * 50 + [100.0] * 50
    times = reuse_times(observe(reused(ages, 0)))
    assert times.all.reuses == 100
    assert times.all.mean_s == pytest.approx(55.0)
    assert times.all.p50_s == pytest.approx(10.0, rel=0.1)
    assert times.all.p90_s == pytest.approx(100.0, rel=0.1)
    assert dict(times.within)[60.0] == pytest.approx(0.5, abs=0.02)


def test_blocks_still_waiting_are_censored_and_not_never() -> None:
    """Half are used again after 10 s and never later: one in three uses is followed.

    The last uses cannot have been followed yet, so they do not lower the share."""
    rng = random.Random(1)
    ages = [10.0 if rng.random() < 0.5 else 1e9 for _ in range(2000)]
    trace = [r for r in reused(ages, 0) if r.time_s < 2000.0]
    row = reuse_times(observe(trace)).all
    assert row.reuses + row.waiting == len(trace)
    assert row.reused_by_end == pytest.approx(1 / 3, abs=0.02)
    assert list(row.observed) == sorted(row.observed)


def test_no_reuse_at_all_is_an_answer_too() -> None:
    times = reuse_times(observe([ask(i, [i]) for i in range(5)]))
    assert times.all.reuses == 0
    assert times.all.reused_by_end == 0.0
    assert len(times.categories) == 0
    assert FINE_BINS > len(times.all.age_s) > 0


def test_capacity_of_a_loop_is_the_loop() -> None:
    """Three blocks in turn: LRU needs all three, and so does a cache with hindsight."""
    trace = [ask(float(i), [i % 3]) for i in range(30)]
    seen, lru = observe(trace), lru_curve(trace)
    c = capacity(seen, lru, 100)
    assert c.ideal_hit_ratio == pytest.approx(27 / 30)
    assert dict(c.lru_for_share)[0.5] == 3
    assert c.live_peak == 3
    sizes, ratio = lru_points(lru)
    assert ratio[list(sizes).index(3)] == pytest.approx(27 / 30)


def test_capacity_counts_only_reused_blocks() -> None:
    trace = [ask(0, [1]), ask(1, [2]), ask(2, [3]), ask(3, [1])]
    seen, lru = observe(trace), lru_curve(trace)
    c = capacity(seen, lru, 1)
    assert c.live_peak == 1
    assert blocks_for(lru, 1.0) == 3


def test_published_numbers_are_compared_and_missing_ones_listed() -> None:
    rows = {r.name: r for r in compare("trace-a", observe(TWO_TALKS))}
    assert rows["ideal block hit ratio"].got == pytest.approx(0.5)
    assert rows["ideal block hit ratio"].met is False
    assert rows["first turns, of requests"].got == pytest.approx(0.6)
    assert rows["search, of requests"].got is None
    assert rows["search, of requests"].met is None
    with pytest.raises(CanopyError, match="trace-a, trace-b"):
        compare("trace-z", observe(TWO_TALKS))
