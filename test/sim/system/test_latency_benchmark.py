"""The arms and the traces of benchmark/latency/simulated.py."""

import itertools

from latency import simulated
from support.systems import request


def test_every_arm_is_a_system_and_has_its_baseline_first():
    keys = [arm.key for arm in simulated.ARMS]
    assert len(keys) == len(set(keys))
    for process_run in simulated.all_system_runs():
        assert process_run.arms[0].key == process_run.arms[0].baseline
        for arm in process_run.arms:
            assert arm.baseline == process_run.arms[0].key
            simulated.make_config(arm, process_run, 1000)


def test_shuffled_starts_keep_the_gaps_of_conversations():
    trace = [request(i, (i + 1,), conversation=str(i % 5), turn=1 + i // 5) for i in range(20)]
    shuffled = simulated.exchange_starts(trace, 3)
    assert [sent.time_s for sent in shuffled] == sorted(sent.time_s for sent in shuffled)
    for name in "01234":
        times_s = [sent.time_s for sent in shuffled if sent.conversation == name]
        assert [end - start for start, end in itertools.pairwise(times_s)] == [5.0, 5.0, 5.0]
    assert [sent.conversation for sent in shuffled] != [sent.conversation for sent in trace]


def test_a_session_ends_before_its_first_request_that_is_too_long():
    blocks_by_user = {"a": (2, 3, 9, 3), "b": (2, 4, 4)}
    trace = [
        request(float(i), tuple(range(blocks)), user=name)
        for name, lengths in blocks_by_user.items()
        for i, blocks in enumerate(lengths)
    ]
    requests = [(sent.user, sent.input_tokens) for sent in simulated.drop_longer(trace, 50)]
    assert requests == [("a", 20), ("a", 30), ("b", 20), ("b", 40), ("b", 40)]
