"""Waiting requests and passes of a scheduler on a real cache."""

import random
from array import array
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_canopy.config.queue import BOUNDED_SHORTEST, QueueFlags
from sglang_canopy.server.scheduler.admission import Admission, arrange_queue, choose_prefill
from sglang_canopy.server.scheduler.arrivals import register_queued
from sglang_canopy.server.scheduler.live_order import LiveOrder
from support.live_tree import LiveTree

PAGE_TOKENS = 4


def tokens(token_count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 2_000) for _ in range(token_count)]


def req_at(tree: LiveTree, ids: list[int], time_s: float, **fields: Any) -> Req:
    """Return a request as the scheduler makes it, which the tree has registered."""
    params = SamplingParams(max_new_tokens=4, custom_params={"canopy": {"time": time_s}})
    req = Req(f"r{time_s}-{len(ids)}-{ids[0]}", "", array("q", ids), params, **fields)
    tree.core.requests.register(req)
    return req


def policy_of(tree: LiveTree, priorities: bool = False, low_first: bool = False) -> SchedulePolicy:
    return SchedulePolicy("fcfs", tree.cache, False, priorities, low_first)


def arrange(tree: LiveTree, waiting: list[Req], policy: Any = None) -> list[Req]:
    waiting = list(waiting)
    arrange_queue(SchedulePolicy.calc_priority, policy or policy_of(tree), waiting, None, 0)
    return waiting


def tree_with_queue(host_tokens: int = 0) -> LiveTree:
    tree = LiveTree(4096, "wa", host_tokens=host_tokens, page_size=PAGE_TOKENS)
    set_order(tree, BOUNDED_SHORTEST)
    return tree


def set_order(tree: LiveTree, order: str) -> None:
    tree.cache.admission = Admission(LiveOrder(tree.cache, QueueFlags(queue_order=order)))


def add_to_queue(tree: LiveTree, waiting: list[Req], *reqs: Req) -> None:
    """Let ``reqs`` join the queue of a scheduler in which others wait."""
    scheduler = scheduler_with(waiting, tree_cache=tree.cache, enable_lora=False)
    for req in reqs:
        register_queued(scheduler, req)


def batch_of(
    reqs: list[Any],
    new_tokens: list[int],
    cached_tokens: list[int],
    launch_s: float | None,
    forward_mode: ForwardMode = ForwardMode.EXTEND,
) -> Any:
    """Return a batch that computes ``new_tokens`` and has ``cached_tokens``, by request."""
    token_counts = {"extend_lens": new_tokens, "prefix_lens": cached_tokens}
    return SimpleNamespace(reqs=reqs, launch_ts=launch_s, forward_mode=forward_mode, **token_counts)


def scheduler_with(waiting: list[Req], **fields: Any) -> Any:
    return SimpleNamespace(
        waiting_queue=list(waiting),
        running_batch=SimpleNamespace(reqs=[]),
        last_batch=None,
        chunked_req=None,
        **fields,
    )


def admit_first(tree: LiveTree, waiting: list[Req], admitted_count: int) -> tuple[Any, list[Req]]:
    """Make a pass that admits the first ``admitted_count`` requests; return the scheduler and these requests."""
    scheduler = scheduler_with(waiting, tree_cache=tree.cache)
    admitted_reqs: list[Req] = []

    def choose() -> tuple[Any, Any]:
        waiting = scheduler.waiting_queue
        arrange_queue(SchedulePolicy.calc_priority, policy_of(tree), waiting, None, 0)
        admitted_reqs[:] = scheduler.waiting_queue[:admitted_count]
        scheduler.waiting_queue = scheduler.waiting_queue[admitted_count:]
        batch = SimpleNamespace(reqs=list(admitted_reqs)) if admitted_reqs else None
        return batch, SimpleNamespace(is_empty=lambda: True)

    choose_prefill(lambda *_: choose(), scheduler, scheduler.running_batch)
    return scheduler, admitted_reqs
