"""Sending times of a replay's requests, on a clock that only the test moves."""

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from canopy_lab.live.replay.schedule import ReplayRequest, Schedule
from canopy_lab.trace import TraceRequest
from canopy_lab.trace.materialise import PlannedJob
from canopy_lab.trace.sessions import TurnLinks


class VirtualClockSelector(selectors.DefaultSelector):
    """Instead of waiting, moves the loop's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout:
            # At least a step that a float shows.
            self.now_s += max(timeout, 1e-9)
        return super().select(0)


def run_on_virtual_clock(main: Callable[[], Any]) -> Any:
    selector = VirtualClockSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now_s  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


def make_jobs(previous: list[int | None]) -> list[ReplayRequest]:
    request = TraceRequest(0.0, 1, 1, (), 1)
    return [ReplayRequest(PlannedJob(request, i, 1, 1, p), {}) for i, p in enumerate(previous)]


def send(
    previous: list[int | None],
    offsets_s: list[float],
    answer_times_s: list[float],
    limit: int | None = None,
    closed_loop: TurnLinks | None = None,
) -> list[tuple[int, float, float]]:
    """Return ``(ordinal, due_s, sent_s)`` of a replay where request i is answered after ``answer_times_s[i]``."""

    async def main() -> list[tuple[int, float, float]]:
        jobs = make_jobs(previous)
        schedule = Schedule(jobs, offsets_s, limit, closed_loop)
        clock = asyncio.get_running_loop().time
        sends, running = [], []

        async def answer(job: ReplayRequest) -> None:
            await asyncio.sleep(answer_times_s[job.planned.ordinal])
            schedule.record_answer(job)

        async for job in schedule.arrivals():
            sends.append((job.planned.ordinal, job.due_s, clock()))
            running.append(asyncio.create_task(answer(job)))
        await asyncio.gather(*running)
        return sends

    return run_on_virtual_clock(main)


def test_in_a_closed_loop_a_turn_follows_the_answer_and_the_time_to_think() -> None:
    # 1 follows 0 in its conversation; 2, a sub-agent's first, follows 0 as well; 3 begins at 50 s.
    closed_loop = TurnLinks([0, 0, 0, 3], [-1, 0, 0, -1], [0.0, 2.0, 5.0, 0.0])
    sends = send(
        [None, 0, None, None],
        [0.0, 99.0, 0.0, 50.0],
        [10.0, 1.0, 1.0, 1.0],
        closed_loop=closed_loop,
    )
    due_s = {ordinal: round(due_s, 6) for ordinal, due_s, _ in sends}
    assert due_s == {0: 0.0, 1: 12.0, 2: 15.0, 3: 50.0}


def test_a_turn_waits_at_the_client_from_when_it_is_due() -> None:
    sends = send([None, None], [0.0, 1.0], [10.0, 1.0], limit=1)
    assert [(round(due, 6), round(sent, 6)) for _, due, sent in sends] == [(0.0, 0.0), (1.0, 10.0)]


def test_a_replay_without_pauses_keeps_the_order_of_the_trace() -> None:
    # Turn 2 of the first conversation is third in the trace, and is sent third.
    sends = send([None, None, 0, None, None, 1], [0.0] * 6, [2.0, 3.0, 1.0, 1.0, 1.0, 1.0], limit=1)
    assert [ordinal for ordinal, _, _ in sends] == [0, 1, 2, 3, 4, 5]
    assert [round(sent_s) for _, _, sent_s in sends] == [0, 2, 5, 6, 7, 8]
    assert [round(due_s) for _, due_s, _ in sends] == [0, 0, 2, 0, 0, 5]


def test_no_more_requests_than_the_limit_run_at_a_time() -> None:
    sends = send([None] * 6, [0.0] * 6, [3.0] * 6, limit=2)
    assert [round(sent_s) for _, _, sent_s in sends] == [0, 0, 3, 3, 6, 6]


def test_a_previous_request_that_is_not_replayed_is_not_waited_for() -> None:
    replayed = make_jobs([None, None])
    replayed[1].planned.previous = 77

    async def main() -> list[int]:
        return [job.planned.ordinal async for job in Schedule(replayed, [0.0, 1.0]).arrivals()]

    assert run_on_virtual_clock(main) == [0, 1]


@given(st.data())
def test_every_request_is_sent_once_and_never_too_early(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 15))
    previous = [data.draw(st.none() | st.integers(0, i - 1)) if i else None for i in range(count)]
    durations_s = st.floats(0, 100, allow_nan=False)
    offsets_s = sorted(data.draw(st.lists(durations_s, min_size=count, max_size=count)))
    answer_times_s = data.draw(st.lists(durations_s, min_size=count, max_size=count))
    sends = send(previous, offsets_s, answer_times_s)
    assert sorted(i for i, _, _ in sends) == list(range(count))
    sent_s = {i: time_s for i, _, time_s in sends}
    for i in range(count):
        earliest_s = offsets_s[i]
        if previous[i] is not None:
            earliest_s = max(earliest_s, sent_s[previous[i]] + answer_times_s[previous[i]])
        assert sent_s[i] >= earliest_s - 2e-6
        assert sent_s[i] <= earliest_s + 1e-3
