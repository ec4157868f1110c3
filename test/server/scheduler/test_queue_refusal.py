"""Early refusal of requests that join a scheduler's queue, on a real cache."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_canopy.config.queue import BOUNDED_SHORTEST, QueueFlags, TtftSlo
from sglang_canopy.server.scheduler import queue, session_gate
from sglang_canopy.server.scheduler.live_queue import LiveQueue
from support.live_tree import LiveTree
from support.waiting_requests import (
    arranged,
    chosen,
    made,
    policy_of,
    scheduler_with,
    tokens,
    tree_with_queue,
)


@pytest.fixture
def tree() -> LiveTree:
    return tree_with_queue()


def refusing(tree: LiveTree, over: str = "refuse", seconds: float = 1.0) -> Any:
    """A scheduler that refuses early; requests take 1 ms per token."""
    slo = TtftSlo(seconds, over)
    live = LiveQueue(tree.cache, QueueFlags(queue_order=BOUNDED_SHORTEST, ttft_slo=slo))
    live.cost.adopt((0.0, 1e-3, 0.0, 0.0))
    tree.cache.canopy_queue = live
    sent: list[Any] = []
    return scheduler_with(
        [],
        tree_cache=tree.cache,
        send_abort_output=lambda abort, req: sent.append(abort.finished_reason["message"]),
        sent=sent,
        max_queued_requests=None,
        enable_priority_scheduling=False,
        schedule_low_priority_values_first=False,
        _release_aborted_request=lambda _req: None,
        beam_coordinator=SimpleNamespace(retire_group=lambda _req: None),
    )


def joins(scheduler: Any, req: Req, held: bool = False) -> bool:
    """Whether ``req`` joins the queue, after SGLang's limit. ``held``: by the session gate."""
    queue.request_queued(scheduler, req)
    gate = SimpleNamespace(holds=lambda _ticket: held)
    scheduler.canopy_session_gate = SimpleNamespace(request_comes=lambda *_: None, gate=gate)
    if session_gate.queue_limited(Scheduler._abort_on_queued_limit, scheduler, req):
        return False
    scheduler.waiting_queue.append(req)
    return True


@pytest.mark.parametrize("left", [0, 1])
def test_requests_that_left_before_a_pass_are_no_work_ahead(tree: LiveTree, left: int) -> None:
    """The engine decodes with a full batch, so no pass orders the queue."""
    scheduler = refusing(tree)
    many = [made(tree, tokens(200, n), 1.0 + n / 1e3) for n in range(10)]
    taken = [joins(scheduler, req) for req in many]
    assert 0 < sum(taken) < 10
    scheduler.waiting_queue = scheduler.waiting_queue[:left]  # the clients went away
    for _ in range(2):
        queue.prefill_chosen(
            scheduler, scheduler.running_batch, lambda: (None, SimpleNamespace(is_empty=bool))
        )
    assert joins(scheduler, made(tree, tokens(300, 50), 2.0), held=True)
    assert joins(scheduler, made(tree, tokens(600, 51), 2.1))


def test_finished_requests_are_not_counted_as_work_ahead(tree: LiveTree) -> None:
    scheduler = refusing(tree)
    gone = [made(tree, tokens(200, n), 1.0 + n / 1e3) for n in range(4)]
    assert all(joins(scheduler, req) for req in gone)
    arranged(tree, scheduler.waiting_queue)
    scheduler.waiting_queue = []
    assert all(joins(scheduler, made(tree, tokens(10, 20 + n), 2.0)) for n in range(4))
    queue.prefill_chosen(
        scheduler, scheduler.running_batch, lambda: (None, SimpleNamespace(is_empty=bool))
    )
    assert joins(scheduler, made(tree, tokens(900, 50), 3.0))


def joining(tree: LiveTree, count: int, of: int, **fields: Any) -> tuple[Any, list[bool]]:
    """A scheduler with priorities, and the answers to ``count`` requests of ``of`` tokens that join
    before its next pass."""
    scheduler = refusing(tree)
    arranged(tree, [], policy_of(tree, priorities=True))
    came = [made(tree, tokens(of, n), 1.0 + n / 1e3, **fields) for n in range(count)]
    return scheduler, [joins(scheduler, req) for req in came]


def test_requests_of_a_lower_priority_that_have_just_come_are_no_work_ahead(tree: LiveTree) -> None:
    scheduler, joined = joining(tree, 9, 100, priority=0)
    assert all(joined)
    assert joins(scheduler, made(tree, tokens(200, 50), 2.0, priority=5))


def test_longer_requests_of_a_higher_priority_that_have_just_come_are_work_ahead(
    tree: LiveTree,
) -> None:
    scheduler, joined = joining(tree, 1, 900, priority=5)
    assert all(joined)
    assert not joins(scheduler, made(tree, tokens(200, 50), 2.0, priority=0))


def test_another_tenants_requests_that_have_just_come_take_one_turn_each(tree: LiveTree) -> None:
    scheduler, joined = joining(tree, 9, 100, cache_salt="flood")
    assert all(joined)
    assert joins(scheduler, made(tree, tokens(200, 50), 2.0))
    assert not joins(scheduler, made(tree, tokens(200, 51), 2.0, cache_salt="flood"))


def test_no_request_leaves_for_one_that_is_refused_early(tree: LiveTree) -> None:
    """SGLang's limit aborts a waiting request of a lower priority."""
    scheduler = refusing(tree)
    scheduler.max_queued_requests, scheduler.enable_priority_scheduling = 1, True
    refusal, waits = tree.cache.canopy_queue.refusal, made(tree, tokens(100, 1), 1.0, priority=0)
    assert joins(scheduler, waits)
    assert not joins(scheduler, made(tree, tokens(4000, 2), 2.0, priority=5))
    assert scheduler.waiting_queue == [waits]
    assert "predicted" in scheduler.sent.pop()
    assert joins(scheduler, made(tree, tokens(200, 3), 3.0, priority=5))
    assert [req.priority for req in scheduler.waiting_queue] == [5]
    before = refusal.entering()
    assert not joins(scheduler, made(tree, tokens(201, 4), 4.0, priority=1))
    assert "queue is full" in scheduler.sent.pop()
    assert refusal.entering() == before


def test_a_chunked_prefill_that_is_computed_is_no_work_ahead(tree: LiveTree) -> None:
    scheduler = refusing(tree)
    live, long = tree.cache.canopy_queue, made(tree, tokens(900, 1), 1.0)
    assert joins(scheduler, long)
    _, found = chosen(tree, [long], 1)
    long.full_untruncated_fill_ids, long.prefix_len = long.origin_input_ids, 100
    scheduler.chunked_req, scheduler.running_batch = long, SimpleNamespace(reqs=found)
    scheduler.waiting_queue = []

    def choose() -> Any:
        arranged(tree, [])
        return None, SimpleNamespace(is_empty=bool)

    queue.prefill_chosen(scheduler, scheduler.running_batch, choose)
    assert live.order.work_before_new(0.9).before_s > 0.7
    scheduler.chunked_req = None  # it decodes, and nothing waits
    queue.prefill_chosen(
        scheduler, scheduler.running_batch, lambda: (None, SimpleNamespace(is_empty=bool))
    )
    assert live.order.work_before_new(0.9).before_s == 0.0


def samples_of_one(tree: LiveTree, ids: list[int]) -> list[Req]:
    """The warm-up and two samples of a request with n = 2."""
    found = []
    for number in range(3):
        params = SamplingParams(
            max_new_tokens=4 if number else 0,
            custom_params={"canopy": {"time": 1.0, "samples": 2}},
        )
        found.append(Req(f"n{number}", "", array("q", ids), params))
    return found


def test_samples_get_their_warm_ups_answer(tree: LiveTree) -> None:
    scheduler = refusing(tree)
    assert [joins(scheduler, req) for req in samples_of_one(tree, tokens(4000, 1))] == [False] * 3
    assert set(scheduler.sent) == {scheduler.sent[0]}
    assert "retry after 3 s" in scheduler.sent[0]


@pytest.mark.parametrize("over", ["refuse", "queue"])
def test_samples_of_a_warm_up_that_ended_otherwise_are_not_refused(tree: LiveTree, over) -> None:
    scheduler = refusing(tree, over)
    first, *samples = samples_of_one(tree, tokens(100, 1))
    assert joins(scheduler, first)
    tree.core.requests.refuse(tree.core.requests.of(first), 0)  # such as by SGLang's limit
    assert all(joins(scheduler, req) for req in samples)
