"""Requests of a trace: their times, hints and paths, and their compact records."""

import pickle
from collections import Counter

import pytest

from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.requests import SimulatedHints, continuations, to_requests
from sglang_canopy.errors import CanopyError
from support.trace_samples import random_trace, record


def test_equal_times_become_distinct_and_keep_their_order():
    requests = list(to_requests([record(0, [1]), record(0, [2]), record(0, [3]), record(3, [4])]))
    times_s = [request.time for request in requests]
    assert times_s == sorted(set(times_s))
    assert times_s[2] < 1e-9
    assert times_s[3] == 3.0


def test_time_running_backwards_names_the_line():
    with pytest.raises(CanopyError, match="trace line 7"):
        list(to_requests([record(2, [1]), record(1, [2], line=7)]))


def test_a_shuffle_keeps_the_number_of_requests_with_each_label():
    trace = random_trace(0, 200)
    labels = [(r.category, r.turn, r.stop) for r in to_requests(trace)]
    shuffled = [(r.category, r.turn, r.stop) for r in to_requests(trace, shuffle_seed=1)]
    repeated = [(r.category, r.turn, r.stop) for r in to_requests(trace, shuffle_seed=1)]
    assert Counter(labels) == Counter(shuffled)
    assert labels != shuffled == repeated


def test_a_path_continues_when_its_last_full_block_is_used_again():
    trace = [
        record(0, [1, 2, 3], missing_tokens=5),  # block 3 is partial: 2 is the last full one
        record(4, [1, 2, 4, 5]),
        record(7, [1, 6]),
        record(9, [1, 2, 4, 5]),
    ]
    assert continuations(trace) == [4.0, 5.0, None, None]


def test_exact_hints_equal_the_traces_future():
    trace = [record(0, [1, 2]), record(4, [1, 2, 3]), record(5, [9])]
    requests = list(to_requests(trace, hints=SimulatedHints()))
    assert [(r.over, r.return_in_s) for r in requests] == [(False, 4.0), (True, None), (True, None)]


def test_share_zero_gives_no_hints_and_accuracy_zero_only_false_ones():
    trace = random_trace(3, 100)
    are_over = [gap is None for gap in continuations(trace)]
    without_hints = list(to_requests(trace, hints=SimulatedHints(share=0)))
    false_hints = list(to_requests(trace, hints=SimulatedHints(accuracy=0)))
    assert not any(request.over or request.return_in_s is not None for request in without_hints)
    assert [request.over for request in false_hints] == [not over for over in are_over]


def test_the_share_is_of_conversations():
    trace = [record(t, [t % 200, 1000 + t], conversation=f"c{t % 200}") for t in range(1000)]
    requests = list(to_requests(trace, hints=SimulatedHints(share=0.5, seed=3)))
    conversations = {r.conversation for r in requests if r.over or r.return_in_s is not None}
    assert 70 < len(conversations) < 130
    with pytest.raises(CanopyError, match="share"):
        SimulatedHints(share=2)


def test_a_conversation_that_rewrites_its_history_continues():
    # The second request drops blocks 3 and 4, which are not used again.
    trace = [
        record(0, [1, 2, 3, 4], conversation="a"),
        record(4, [1, 2, 9, 10], conversation="a"),
        record(5, [1, 2, 7], conversation="b"),
    ]
    assert continuations(trace) == [4.0, None, None]
    requests = list(to_requests(trace, hints=SimulatedHints()))
    assert [(r.over, r.return_in_s) for r in requests] == [(False, 4.0), (True, None), (True, None)]


def test_compact_records_survive_a_round_trip():
    for seed in range(20):
        trace = random_trace(seed)
        compact = CompactTrace(iter(trace))
        assert list(compact) == trace
        assert compact[-1] == trace[-1]
        assert compact[3:5] == trace[3:5]
        assert list(reversed(compact)) == trace[::-1]
        uses = Counter(block for request in trace for block in request.blocks)
        assert compact.distinct_blocks == len(uses)
        assert compact.repeated_blocks == sum(count > 1 for count in uses.values())


def test_compact_records_survive_pickling():
    trace = [record(0, [1, 2, 3], stop="tool", user="u"), record(1, [1, 2, 4]), record(2, [])]
    assert list(pickle.loads(pickle.dumps(CompactTrace(trace)))) == trace


def test_compact_records_store_each_block_once():
    depth = 300
    trace = [record(time_s, range(time_s)) for time_s in range(1, depth)]
    stored_blocks = sum(len(run) for run in CompactTrace(trace).runs)
    assert stored_blocks == depth - 1
