"""The scheduler's thread is charged for what hooks do, and not for what SGLang does inside them."""

import itertools

import pytest

from sglang_canopy import thread_time


@pytest.fixture
def clock(monkeypatch):
    """A thread's clock that a test moves; every call is timed."""
    now = [0.0]
    monkeypatch.setattr(thread_time, "_clocks", {})
    monkeypatch.setattr(thread_time, "_every", 1)
    monkeypatch.setattr(thread_time.time, "thread_time", lambda: now[0])
    return now


def test_a_hook_pays_for_itself(clock):
    def hook(seconds):
        clock[0] += seconds
        return "done"

    counted = thread_time.timed("Scheduler.step", hook, around=False)
    assert [counted(s) for s in (1.0, 4.0, 2.0)] == ["done"] * 3
    said = thread_time.report()
    assert said["seams"]["Scheduler.step"] == {"calls": 3, "seconds": 7.0, "longest_s": 4.0}
    assert said["thread_s"] == 7.0


def test_a_hooks_time_excludes_the_hooked_function(clock):
    def original(seconds):
        clock[0] += seconds
        return seconds

    def hook(original, seconds):
        clock[0] += 1.0
        return original(seconds) + original(seconds)

    counted = thread_time.timed("Scheduler.step", hook, around=True)
    assert counted(original, 50.0) == 100.0
    assert thread_time.report()["seams"]["Scheduler.step"]["seconds"] == 1.0


def test_a_forward_that_a_hook_starts_is_computation(clock):
    def hook(failing):
        clock[0] += 1.0
        with thread_time.computation("documents"):
            clock[0] += 20.0
            if failing:
                raise KeyError("no")

    counted = thread_time.timed("Scheduler.idle", hook, around=False)
    counted(False)
    with pytest.raises(KeyError):
        counted(True)
    counted(False)
    said = thread_time.report()["seams"]
    assert said["Scheduler.idle"]["seconds"] == 3.0
    assert said["computed.documents"] == {"calls": 3, "seconds": 60.0, "longest_s": 20.0}


def test_a_hook_that_fails_is_charged_and_fails(clock):
    def hook():
        clock[0] += 3.0
        raise KeyError("no")

    with pytest.raises(KeyError):
        thread_time.timed("Scheduler.step", hook, around=False)()
    assert thread_time.report()["seams"]["Scheduler.step"]["longest_s"] == 3.0


def test_a_sample_represents_all_calls(clock, monkeypatch):
    monkeypatch.setattr(thread_time, "_every", 5)
    numbers = itertools.count()

    def hook():
        next(numbers)
        clock[0] += 2.0

    counted = thread_time.timed("Scheduler.step", hook, around=False)
    for _ in range(50):
        counted()
    assert next(numbers) == 50
    assert thread_time.report()["seams"]["Scheduler.step"]["seconds"] == 100.0


def test_a_method_of_the_tree_is_timed_whole_under_its_name(clock):
    class Tree:
        @thread_time.timed_method
        def _evict(self, seconds):
            clock[0] += seconds
            return self

    tree = Tree()
    assert tree._evict(2.0) is tree
    assert thread_time.report()["seams"]["radix.evict"]["seconds"] == 2.0
