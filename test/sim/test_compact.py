"""A compact trace is the trace."""

import pickle
from collections import Counter

from canopy_lab.sim.compact import CompactTrace
from support.trace_samples import mooncake, random_trace, record


def test_records_survive_a_round_trip():
    for seed in range(20):
        trace = random_trace(seed)
        compact = CompactTrace(iter(trace))
        assert list(compact) == trace
        assert compact[-1] == trace[-1]
        assert compact[3:5] == trace[3:5]
        assert list(reversed(compact)) == trace[::-1]
        uses = Counter(b for r in trace for b in r.blocks)
        assert compact.distinct_blocks == len(uses)
        assert compact.repeated_blocks == sum(n > 1 for n in uses.values())


def test_it_survives_pickling():
    trace = [record(0, [1, 2, 3], stop="tool", user="u"), record(1, [1, 2, 4]), record(2, [])]
    assert list(pickle.loads(pickle.dumps(CompactTrace(trace)))) == trace


def test_each_block_is_stored_once():
    depth = 300
    trace = [record(t, range(t)) for t in range(1, depth)]
    stored = sum(len(run) for run in CompactTrace(trace).runs)
    assert stored == depth - 1


def test_real_conversations_survive_a_round_trip():
    trace = mooncake(limit=2000)
    assert list(CompactTrace(trace)) == trace
