"""benchmark/latency/simulated.py: its arms are valid systems; its traces."""

import itertools

from latency import simulated
from support.systems import request


def test_every_arm_is_a_system_and_has_its_baseline_first():
    keys = [arm.key for arm in simulated.ARMS]
    assert len(keys) == len(set(keys))
    for part in simulated.process_runs():
        assert part.arms[0].key == part.arms[0].baseline
        for arm in part.arms:
            assert arm.baseline == part.arms[0].key
            simulated.make_config(arm, part, 1000)


def test_shuffled_starts_keep_the_gaps_of_conversations():
    trace = [request(i, (i + 1,), conversation=str(i % 5), turn=1 + i // 5) for i in range(20)]
    shuffled = simulated.exchange_starts(trace, 3)
    assert [r.time_s for r in shuffled] == sorted(r.time_s for r in shuffled)
    for name in "01234":
        times = [r.time_s for r in shuffled if r.conversation == name]
        assert [b - a for a, b in itertools.pairwise(times)] == [5.0, 5.0, 5.0]
    assert [r.conversation for r in shuffled] != [r.conversation for r in trace]


def test_a_session_ends_before_its_first_request_that_is_too_long():
    lengths = {"a": (2, 3, 9, 3), "b": (2, 4, 4)}
    trace = [
        request(float(i), tuple(range(n)), user=name)
        for name, blocks in lengths.items()
        for i, n in enumerate(blocks)
    ]
    requests = [(r.user, r.input_tokens) for r in simulated.drop_longer(trace, 50)]
    assert requests == [("a", 20), ("a", 30), ("b", 20), ("b", 40), ("b", 40)]
