"""The waiting queue of a scheduler on a real cache: order, protection, and cost."""

import gc
import weakref
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_canopy.config.queue import BOUNDED_SHORTEST, SGLANG, QueueFlags
from sglang_canopy.server.scheduler import arrivals, live_order
from sglang_canopy.server.scheduler.admission import arrange_queue, choose_prefill, limit_chunk
from sglang_canopy.server.scheduler.live_order import PROTECTED_REQUESTS, LiveOrder
from support.live_tree import LiveTree
from support.waiting_requests import (
    PAGE_TOKENS,
    add_to_queue,
    admit_first,
    arrange,
    batch_of,
    policy_of,
    req_at,
    scheduler_with,
    set_order,
    tokens,
    tree_with_queue,
)


@pytest.fixture
def tree() -> LiveTree:
    return tree_with_queue()


def test_by_default_the_order_is_sglangs(tree: LiveTree) -> None:
    set_order(tree, SGLANG)
    waiting = [req_at(tree, tokens(n, n), 1.0 + n / 1e3) for n in (900, 20, 300)]
    assert arrange(tree, waiting) == waiting


def test_the_status_has_the_order_and_the_waiting_requests(tree: LiveTree) -> None:
    arrange(tree, [req_at(tree, tokens(n, n), 1.0 + n / 1e3) for n in (900, 20, 300)])
    status = tree.cache.admission.order.status()
    assert (status["order"], status["waiting_requests"]) == (BOUNDED_SHORTEST, 3)
    assert status["admitted"] == {"shortest": 0, "budget": 0}
    default_status = LiveOrder(tree.cache, QueueFlags()).status()
    assert default_status["order"] == "sglang"
    assert default_status["admitted"] is None


def test_requests_not_announced_by_sglang_have_a_record_in_the_queue(tree, monkeypatch) -> None:
    """SGLang announces no request for embeddings, and none before 0.5.23. A hook has set the extra key."""
    listeners = [lambda _, req: setattr(req, "extra_key", "docs")]
    monkeypatch.setattr(arrivals, "_queued_callbacks", listeners)
    monkeypatch.setattr(arrivals, "_created_callbacks", [])
    announced = req_at(tree, tokens(200, 1), 1.0, extra_key="docs")
    add_to_queue(tree, [], req := Req("r", "", announced.origin_input_ids, SamplingParams()))
    assert req.canopy.request.path == announced.canopy.request.path != []


def test_cached_tokens_cost_less(tree: LiveTree) -> None:
    shared_prefix = tokens(800, seed=1)
    tree.serve(shared_prefix, 0.5)
    uncached_req = req_at(tree, tokens(400, 2), 1.0)
    cached_req = req_at(tree, [*shared_prefix, *tokens(40, 3)], 1.0)
    add_to_queue(tree, [uncached_req], uncached_req, cached_req)
    req_at(tree, [7], 2.0)  # time passes with the requests
    assert arrange(tree, [uncached_req, cached_req]) == [cached_req, uncached_req]


@pytest.mark.parametrize("host_tokens", [0, 8192])
def test_kv_of_waiting_requests_is_at_risk_without_a_host_tier(host_tokens: int) -> None:
    tree = tree_with_queue(host_tokens)
    tree.serve(shared := tokens(800, seed=1), 0.5)
    uncached = [req_at(tree, tokens(1_500 if i else 300, i + 2), 1.0 + i / 9) for i in range(4)]
    cached = req_at(tree, [*shared, *tokens(400, 9)], 2.0)
    order = arrange(tree, [*uncached, cached])
    assert order[0] is (uncached[0] if host_tokens else cached)
    assert tree.cache.admission.order.bounded_queue.is_kv_at_risk == (not host_tokens)


def test_overtaken_requests_that_left_are_recorded(tree: LiveTree) -> None:
    queue_order = tree.cache.admission.order
    waiting = [req_at(tree, tokens(100 + i, i), 1.0 + i / 100) for i in range(20)]
    req_at(tree, [7], 5.0)
    in_order = arrange(tree, waiting)
    aborted, admitted = in_order[3], in_order[0]
    remaining = [req for req in waiting if req not in (aborted, admitted)]
    scheduler = scheduler_with([*remaining, admitted])
    batch = batch_of([admitted], [100], [0], 0.0)
    tree.cache.admission.choose(scheduler, None, lambda: (batch, None))
    assert set(arrange(tree, remaining)) == set(remaining)
    assert len(queue_order.bounded_queue.in_order()) == len(remaining) == len(queue_order.arranged)
    cost_s = queue_order.prefill_cost.seconds(queue_order.prefill(admitted, False))
    assert queue_order.bounded_queue.shares._next_start[None] == pytest.approx(cost_s)
    # A retracted request is queued again, with its position.
    assert set(arrange(tree, [*remaining, admitted])) == {*remaining, admitted}
    assert queue_order.bounded_queue.in_order(0)[0].request in (admitted, waiting[0])
    assert arrange(tree, []) == []
    assert len(queue_order.bounded_queue.in_order()) == 0


@pytest.mark.parametrize("is_low_first", [False, True])
def test_sglangs_priorities_are_respected(tree: LiveTree, is_low_first: bool) -> None:
    waiting = [
        req_at(tree, tokens(400 if i % 2 else 20, i), 1.0 + i / 100, priority=i % 2)
        for i in range(10)
    ]
    req_at(tree, [7], 9.0)
    in_order = arrange(tree, waiting, policy_of(tree, priorities=True, low_first=is_low_first))
    priorities = [req.priority for req in in_order]
    assert priorities == sorted(priorities, reverse=not is_low_first)


def test_tenants_alternate(tree: LiveTree) -> None:
    waiting = [req_at(tree, tokens(10, i), 1.0 + i / 1e3) for i in range(30)]
    waiting += [req_at(tree, tokens(200, 100 + i), 1.1 + i / 1e3, cache_salt="t") for i in range(3)]
    req_at(tree, [7], 9.0)
    assert waiting.index(next(req for req in arrange(tree, waiting) if req.cache_salt)) == 30
    tenants_position = [req.cache_salt for req in arrange(tree, waiting)].index("t")
    assert tenants_position <= 1


def is_protected(tree: LiveTree, token_ids: list[int]) -> bool:
    """Return whether the deepest cached node of ``ids`` is protected for a waiting request."""
    return any(
        leaf.awaited_until is not None and leaf.node.key.raw_token_ids()[0] == token_ids[0]
        for leaf in tree.core.protected.awaited
    )


@pytest.mark.parametrize("order", ["sglang", BOUNDED_SHORTEST])
def test_a_prefix_is_protected_from_arrival_on(tree: LiveTree, order: str) -> None:
    set_order(tree, order)
    prefix = tokens(400, seed=1)
    tree.serve(prefix, 0.1)
    for i in range(8):
        tree.serve(tokens(400, 10 + i), 0.2 + i / 10)
    head, tail = req_at(tree, tokens(50, 2), 2.0), req_at(tree, [*prefix, 5], 2.1)
    add_to_queue(tree, [head], tail)
    assert is_protected(tree, prefix)
    tree.evict(2000)
    assert tree.match(prefix) == 400


def test_the_budget_protects_the_next_requests(tree: LiveTree) -> None:
    """Requests far behind arrived first and used the whole budget; the next pass gives it to the head."""
    set_order(tree, SGLANG)
    prefixes = [tokens(400, seed) for seed in range(1, 10)]
    for i, prefix in enumerate(prefixes):
        tree.serve(prefix, 0.1 + i / 100)
    waiting = [req_at(tree, [*prefix, 5], 2.0 + i / 100) for i, prefix in enumerate(prefixes)]
    add_to_queue(tree, waiting[:1], *reversed(waiting))
    assert is_protected(tree, prefixes[-1])
    assert not is_protected(tree, prefixes[0])
    arrange(tree, waiting)
    assert is_protected(tree, prefixes[0])
    assert not is_protected(tree, prefixes[-1])
    assert (
        tree.core.protected.awaited.budget.used_tokens
        <= tree.core.protected.awaited.budget.tenant_limit_tokens
    )


def test_prefixes_without_waiting_requests_are_not_protected(tree: LiveTree) -> None:
    prefix = tokens(400, seed=1)
    tree.serve(prefix, 0.1)
    aborted, remaining = req_at(tree, [*prefix, 5], 2.0), req_at(tree, tokens(30, 3), 2.0)
    add_to_queue(tree, [remaining], aborted)
    assert is_protected(tree, prefix)
    arrange(tree, [remaining])
    assert list(tree.core.protected.awaited) == []
    assert tree.core.protected.awaited.budget.used_tokens == 0


def test_lookups_of_a_pass_are_bounded(tree: LiveTree, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = [req_at(tree, tokens(30, i), 1.0 + i / 1e4) for i in range(1_000)]
    arrange(tree, waiting)
    matched_reqs: list[Req] = []
    monkeypatch.setattr(live_order, "match_kv_cache", lambda req, _cache: matched_reqs.append(req))
    max_lookups, matched_rids = 0, set()
    for pass_number in range(300):
        matched_reqs.clear()
        tree.serve([3_000 + pass_number] * PAGE_TOKENS, 2.0)  # every match is of an earlier tree
        waiting = arrange(tree, waiting)
        max_lookups = max(max_lookups, len(matched_reqs))
        matched_rids |= {req.rid for req in matched_reqs}
    assert max_lookups <= PROTECTED_REQUESTS + 12
    assert len(matched_rids) > 900  # every request in turn


def test_a_request_that_sglang_matched_is_not_matched_again(tree: LiveTree, monkeypatch) -> None:
    order, req = tree.cache.admission.order, req_at(tree, tokens(40, 1), 1.0)
    req.init_next_round_input(tree.cache)
    matched_reqs: list[Req] = []
    monkeypatch.setattr(live_order, "match_kv_cache", lambda req, _cache: matched_reqs.append(req))
    order.look_up(req)
    assert matched_reqs == []
    tree.serve(tokens(20, 2), 2.0)
    order.look_up(req)
    assert matched_reqs == [req]


def branching_requests(tree: LiveTree, count: int = 3) -> list[Req]:
    shared_prefix = tokens(400, 1)
    return [req_at(tree, [*shared_prefix, *tokens(40, 2 + i)], 1.0 + i / 1e3) for i in range(count)]


def test_a_cached_request_beside_a_chunked_prompt_shares_its_steps(tree: LiveTree) -> None:
    """It joins an empty queue, and is matched: by SGLang's order it would wait for the whole prompt."""
    shared_prefix = tokens(800, 1)
    tree.serve(shared_prefix, 0.5)
    chunked_req = req_at(tree, tokens(600, 2), 1.0)
    cached_req = req_at(tree, [*shared_prefix, *tokens(8, 3)], 2.0)
    scheduler, _ = admit_first(tree, [chunked_req], 1)
    chunked_req.full_untruncated_fill_ids = chunked_req.origin_input_ids
    scheduler.enable_lora, scheduler.chunked_req, scheduler.waiting_queue = False, chunked_req, []
    arrivals.register_queued(scheduler, cached_req)
    queue = scheduler.waiting_queue = [cached_req]
    limits = []

    def choose(*_: Any) -> Any:
        policy = policy_of(tree)
        arrange_queue(SchedulePolicy.calc_priority, policy, queue, None, 0)
        limits.append(limit_chunk(lambda *_: None, policy, chunked_req, queue, 512, 4))
        return None, None

    choose_prefill(choose, scheduler, scheduler.running_batch)
    (waiting,) = tree.cache.admission.order.bounded_queue.in_order()
    assert waiting.prefill.uncached <= 12
    assert limits[0] is not None


def test_one_that_waited_alone_stays_older_than_one_that_the_gate_puts_before_it(tree) -> None:
    order = tree.cache.admission.order.arranged
    older, younger = req_at(tree, tokens(100, 1), 1.0), req_at(tree, tokens(100, 2), 2.0)
    order.arrange([older])
    order.arrange([younger, older])
    assert [waiting.request for waiting in order.bounded_queue.in_order(0)] == [older, younger]


def test_host_tokens_of_a_request_that_was_alone_are_charged(tree: LiveTree) -> None:
    order, req = tree.cache.admission.order, req_at(tree, tokens(600, 2), 1.0)
    order.look_up(req)
    req.prefix_len, req.num_matched_prefix_tokens = 0, 400
    assert order.prefill(req, False).loaded == 400
    req.prefix_len, req.host_loaded_length = 400, 400  # as SGLang admits it
    assert order.prefill(req, False).loaded == 400


def test_a_request_that_leaves_the_queue_leaves_no_state(tree: LiveTree) -> None:
    """SGLang takes an aborted request out of its queue and marks nothing on it."""
    queue_order, waiting = tree.cache.admission.order, branching_requests(tree, 2)
    arrange(tree, waiting)
    aborted_ref = weakref.ref(waiting.pop(0))
    assert admit_first(tree, waiting, 1)[1] == waiting
    gc.collect()
    assert aborted_ref() is None
    assert queue_order.bounded_queue.shares._separate.keys() == {None}
    admit_first(tree, [], 0)
    assert (len(queue_order.arranged), len(queue_order.bounded_queue.in_order())) == (0, 0)
    arrange(tree, branching_requests(tree, 2))
    scheduler = scheduler_with([], tree_cache=tree.cache)  # both are aborted, and no other arrives
    choose_prefill(lambda *_: (None, None), scheduler, scheduler.running_batch)
    assert (len(queue_order.arranged), len(queue_order.bounded_queue.in_order())) == (0, 0)


def test_a_request_beyond_a_budget_is_offered_to_no_step_and_stays_in_the_queue(tree):
    bounded_queue = tree.cache.admission.order.bounded_queue
    # Nothing may pass the prompt in chunks.
    bounded_queue.cost_factor, bounded_queue.base_budget_s = 0.0, 0.0
    chunked_req, short_req = (req_at(tree, tokens(900, 1), 1.0), req_at(tree, tokens(20, 2), 2.0))
    scheduler, _ = admit_first(tree, [chunked_req], 1)
    chunked_req.full_untruncated_fill_ids = chunked_req.origin_input_ids
    scheduler.chunked_req, scheduler.waiting_queue = chunked_req, [short_req]
    offered: list[Req] = []

    def choose(*_: Any) -> tuple[Any, Any]:
        waiting = scheduler.waiting_queue
        arrange_queue(SchedulePolicy.calc_priority, policy_of(tree), waiting, None, 0)
        offered.extend(waiting)
        return None, None

    choose_prefill(choose, scheduler, scheduler.running_batch)
    assert (offered, scheduler.waiting_queue) == ([], [short_req])


def test_sglangs_own_order_omits_no_request(tree: LiveTree) -> None:
    set_order(tree, SGLANG)
    waiting = branching_requests(tree)
    assert admit_first(tree, waiting, 3)[1] == waiting


@pytest.mark.xdist_group("ranks")
def test_two_ranks_adopt_the_first_ones_figures_and_decide_equally(on_two_ranks, tmp_path):
    first_rank, second_rank = on_two_ranks("rank_scenarios:order_queue", tmp_path)
    assert first_rank["fitted"] != second_rank["fitted"]  # each timed its own
    assert first_rank["used"] == second_rank["used"] == first_rank["fitted"]
    assert first_rank["orders"] == second_rank["orders"]
    assert len(first_rank["orders"]) > 10


@pytest.mark.parametrize("is_short", [True, False])
def test_a_request_that_was_admitted_is_not_matched(tree: LiveTree, is_short: bool) -> None:
    """SGLang matches nothing for logprobs from the first token, nor for a prompt of one page. A
    match after the admission would move the lock of the running request to another node."""
    prompt = tokens(40, 1)
    tree.serve(prompt, 0.5)
    arrange(tree, [req_at(tree, tokens(40, 2), 1.0)])  # protects the first one's prefix
    arrange(tree, [])
    prompt = prompt[:PAGE_TOKENS] if is_short else prompt
    req = req_at(tree, prompt, 2.0, return_logprob=not is_short)
    req.logprob_start_len = -1 if is_short else 0
    arrange(tree, [req])
    req.init_next_round_input(tree.cache)
    match_before = req.prefix_len, req.last_node, req.best_match_node
    tree.cache.admission.order.arranged.admit([req])
    assert (req.prefix_len, req.last_node, req.best_match_node) == match_before
