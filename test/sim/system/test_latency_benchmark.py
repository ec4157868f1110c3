"""benchmark/latency: its arms are valid systems, and its goodput is interpolated."""

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.systems import request

FOLDER = Path(__file__).resolve().parents[3] / "benchmark" / "latency"


@pytest.fixture
def simulated(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("arms", "simulated", "page"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import simulated

    yield simulated
    for name in ("arms", "simulated", "page"):
        sys.modules.pop(name, None)


def test_every_arm_is_a_system_and_has_its_baseline_first(simulated):
    keys = [arm.key for arm in simulated.ARMS]
    assert len(keys) == len(set(keys))
    for part in simulated.parts():
        assert part.arms[0].key == part.arms[0].baseline
        for arm in part.arms:
            assert arm.baseline == part.arms[0].key
            simulated.config(arm, part, 1000)


def test_another_setting_is_another_run(simulated):
    for workload in simulated.WORKLOADS:
        arms = [arm for arm in simulated.ARMS if workload in arm.workloads]
        assert len({simulated.fingerprint(arm) for arm in arms}) == len(arms)


def test_an_arm_with_a_default_is_run_again_when_the_default_changes(simulated, monkeypatch):
    arms = {arm.key: arm for arm in simulated.ARMS}
    before = {key: simulated.fingerprint(arms[key]) for key in ("sglang", "wa")}
    other = SimpleNamespace(waiting_prefixes="ignored")
    monkeypatch.setattr(simulated, "SystemConfig", lambda **_: other)
    assert simulated.fingerprint(arms["sglang"]) == before["sglang"]
    assert simulated.fingerprint(arms["wa"]) != before["wa"]


def test_shuffled_starts_keep_the_gaps_of_conversations(simulated):
    trace = [
        request(float(i), (i + 1,), conversation=str(i % 5), turn=1 + i // 5) for i in range(20)
    ]
    made = simulated.shuffled(trace, 3)
    assert [r.time_s for r in made] == sorted(r.time_s for r in made)
    for name in "01234":
        times = [r.time_s for r in made if r.conversation == name]
        assert [b - a for a, b in itertools.pairwise(times)] == [5.0, 5.0, 5.0]
    assert [r.conversation for r in made] != [r.conversation for r in trace]


def test_a_session_ends_before_its_first_request_that_is_too_long(simulated):
    lengths = {"a": (2, 3, 9, 3), "b": (2, 4, 4)}
    trace = [
        request(float(i), tuple(range(n)), user=name)
        for name, blocks in lengths.items()
        for i, n in enumerate(blocks)
    ]
    made = [(r.user, r.input_tokens) for r in simulated.up_to(trace, 50)]
    assert made == [("a", 20), ("a", 30), ("b", 20), ("b", 40), ("b", 40)]
