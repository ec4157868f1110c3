"""The last page: which runs, how sure, and that it says LRU where nothing is better."""

from __future__ import annotations

import random

import numpy as np
import pytest

from canopy_lab.characterize.observe import observe
from canopy_lab.characterize.recommend import CANDIDATES, LRU_SHARES, RUNS, bootstrap, recommend
from canopy_lab.characterize.runs import PolicyRun, TraceSample, merge, prepare, run_all
from canopy_lab.trace.record import TraceRequest
from canopy_lab.trace.synth import synthesise
from canopy_lab.trace.synth_presets import get_preset
from support.tiny_traces import ask


def test_merged_blocks_hit_where_all_their_parts_would() -> None:
    a = merge(ask(0, [1, 2, 3, 4, 5]), 2)
    b = merge(ask(1, [1, 2, 3, 9]), 2)
    assert a.block_tokens == 20
    assert len(a.blocks) == 3
    assert a.blocks[0] == b.blocks[0]
    assert a.blocks[1] != b.blocks[1]
    assert merge(ask(2, [9, 3, 3, 4]), 2).blocks[1] != a.blocks[1]  # equal part, other prefix
    assert merge(a, 1) is a


def test_a_long_trace_is_merged_first_and_then_cut() -> None:
    trace = [ask(float(i), list(range(100 * i, 100 * i + 64))) for i in range(50)]
    asked = 50 * 64
    whole = prepare(trace, asked, asked)
    assert (whole.merged, whole.cut, len(whole.requests)) == (1, False, 50)
    half = prepare(trace, asked, asked // 2)
    assert (half.merged, half.cut, len(half.requests)) == (2, False, 50)
    little = prepare(trace, asked, 50)
    assert little.requests[0].block_tokens <= 256
    assert little.cut
    assert little.distinct_blocks == len({b for r in little.requests for b in r.blocks})


def test_the_bootstrap_covers_nothing_gained_and_sees_something_gained() -> None:
    rng = np.random.default_rng(1)
    tokens = np.full(4000, 100)
    cluster = np.arange(4000) // 10
    noise = rng.choice((-20, 20), 4000)
    point, low, high = bootstrap(noise, tokens, cluster, rng)
    assert low < 0 < high
    point, low, high = bootstrap(noise + 5, tokens, cluster, rng)
    assert low < point < high
    assert point == pytest.approx(5.0, abs=1.0)
    assert low > 0


def test_one_cluster_says_that_it_knows_nothing_by_a_flat_interval() -> None:
    point, low, high = bootstrap(
        np.array([5, 5]), np.array([10, 10]), np.array([0, 0]), np.random.default_rng(0)
    )
    assert point == low == high == 50.0


def test_runs_give_the_same_on_one_process_and_on_two() -> None:
    trace = [r.request for r in synthesise(get_preset("small"), 120.0, 1)]
    prepared = TraceSample(requests=trace, distinct_blocks=1000)
    runs = [PolicyRun("lru", 200), PolicyRun("wa", 200), PolicyRun("wa", 200, placebo_seed=1)]
    one, two = (run_all(prepared, runs, jobs) for jobs in (1, 2))
    assert all((one[r] == two[r]).all() for r in runs)
    assert set(one) == set(runs)


def two_sorts(seed: int) -> list[TraceRequest]:
    """Half of the conversations go on every 60 s for long, half never do; their types tell."""
    rng = random.Random(seed)
    events = []
    for talk in range(400):
        start = rng.uniform(0.0, 3000.0)
        stays = talk % 2 == 0
        for turn in range(1, 9 if stays else 2):
            blocks = [1000 * talk + b for b in range(4 + turn)]
            time_s = start + 60.0 * (turn - 1) + rng.uniform(0, 5)
            events.append((time_s, talk, blocks, turn, "stays" if stays else "goes"))
    return [
        ask(t, b, kind=kind, talk=str(talk), turn=turn) for t, talk, b, turn, kind in sorted(events)
    ]


def test_a_trace_whose_types_tell_who_returns_gets_wa_and_its_labels() -> None:
    trace = two_sorts(1)
    seen = observe(trace)
    prepared = prepare(trace, int(seen.blocks.sum()), 10**9)
    done: list[int] = []
    r = recommend(seen, prepared, 16, jobs=1, progress=lambda: done.append(1))
    assert r.policy == "wa"
    assert len(done) == RUNS
    assert len(r.gains) == len(LRU_SHARES)
    middle = r.gains[1]
    assert middle.low <= middle.points <= middle.high
    assert middle.points > middle.placebo_points
    assert middle.hit_ratio - middle.lru_hit_ratio == pytest.approx(middle.points / 100)
    assert set(r.table) == {name for name, _, _ in CANDIDATES}
    assert r.clusters == "conversations"
    assert r.categories != "none"
    assert 0 < r.knee_blocks <= prepared.distinct_blocks


def test_where_recency_is_everything_the_answer_is_lru() -> None:
    """Every block is used again at once or never: no policy can be surely better."""
    trace = []
    for i in range(3000):
        trace.append(ask(10.0 * i, [2 * i, 2 * i + 1], talk=str(i)))
        if i % 3 == 0:
            trace.append(ask(10.0 * i + 1, [2 * i, 2 * i + 1, 10**6 + i], talk=str(i), turn=2))
    seen = observe(trace)
    r = recommend(seen, prepare(trace, int(seen.blocks.sum()), 10**9), 16, jobs=1)
    assert r.policy == "lru"
    assert r.categories == "none"
    assert all(g.points == 0.0 for g in r.gains)
