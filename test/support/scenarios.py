"""Scripted scenarios on SGLang's scheduler, which `worker` runs: the order of the queue, shared steps, retries,
samples, refusals, the meter, and reads of tensors. Each returns the numbers that a test checks."""

import time
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any

from support.fuzz import MAX_STEPS, arm_gate, tighten_budgets
from support.host_reads import CANOPY_PACKAGES, SGLANG_PACKAGE, HostReads
from support.prompts import continuing_prompts, token_ids
from support.scheduler import SteppedScheduler

SchedulerStart = Callable[[], SteppedScheduler]
ANSWER_TOKENS, MAX_ANSWERS = 4, 400


def answer_alone_and_together(engine: SteppedScheduler, prompts: list[list[int]]) -> dict[str, Any]:
    """Serve every prompt alone, then all of them together."""
    answers_alone = []
    for ids in prompts:
        engine.serve([req := engine.feed(ids, ANSWER_TOKENS)])
        answers_alone.append(list(req.output_ids))
    together = [engine.feed(ids, ANSWER_TOKENS) for ids in prompts]
    engine.serve(together)
    retracted = sum(req.retraction_count for req in together)
    answers = [list(req.output_ids) for req in together]
    return {"equal": answers == answers_alone, "retracted": retracted}


def answer_in_order(start: SchedulerStart) -> dict[str, Any]:
    """Return, as ``answered_kinds``, the order of the answers to short, long and urgent requests."""
    engine = start()
    together = answer_alone_and_together(engine, continuing_prompts(18, 1, max_shared_tokens=600))
    running = [engine.feed(token_ids(8, 900 + i), 12) for i in range(3)]
    for _ in range(4):
        engine.step()
    now = time.monotonic()
    kind_by_req = {engine.feed(token_ids(700, seed), 1, time_s=now): "long" for seed in (1, 2, 3)}
    kind_by_req |= {engine.feed(token_ids(20, seed), 1, time_s=now): "short" for seed in (4, 5, 6)}
    if engine.scheduler.enable_priority_scheduling:
        kind_by_req |= {engine.feed(token_ids(700, seed), 1, 5, now): "urgent" for seed in (7, 8)}
    # No further arrivals: time passes only with the steps.
    answered = engine.serve([*kind_by_req, *running])
    cache = engine.scheduler.tree_cache
    cache.sanity_check()
    return {
        **together,
        "policy": engine.scheduler.policy.policy.value,
        "answered_kinds": [kind_by_req[req] for req in answered if req in kind_by_req],
        "fitted": list(cache.admission.order.prefill_cost.coefficients),
        "batches": cache.admission.order.prefill_batches,
    }


def share_steps(start: SchedulerStart, needs_cache: bool) -> dict[str, Any]:
    """Let shorter requests share a long prompt's steps. With ``needs_cache`` it needs tokens of the cache, which
    they would lock. ``admitted_together``: requests admitted with the long prompt."""
    engine = start()
    if needs_cache:
        prefixes = [token_ids(300, seed) for seed in range(6)]
        engine.serve([engine.feed(ids, 1) for ids in prefixes])
        short_prompts = [[*ids, *token_ids(8, 20 + i)] for i, ids in enumerate(prefixes)]
    else:
        short_prompts = [[*token_ids(4, 1), *token_ids(4, 10 + i)] for i in range(60)]
    long_req = engine.feed(token_ids(2600 if needs_cache else 2000, 90), 1)
    engine.step()
    assert engine.scheduler.chunked_req is long_req
    short_reqs = [engine.feed(ids, 4 if needs_cache else 1) for ids in short_prompts]
    later_reqs = [] if needs_cache else [engine.feed(token_ids(300, 100 + i), 1) for i in range(3)]
    engine.step()
    engine.step()
    waiting = engine.scheduler.waiting_queue
    admitted_together = sum(req not in waiting for req in short_reqs)
    answered = len(engine.serve([long_req, *short_reqs, *later_reqs]))
    engine.scheduler.tree_cache.sanity_check()
    return {"answered": answered, "admitted_together": admitted_together}


def overtaken_by_short(engine: SteppedScheduler, ids: list[int], rid: str) -> list[Any]:
    """Let a short request overtake ``ids``, which waits under the name ``rid``; return the other requests."""
    running = [engine.feed(token_ids(8, 902), 6), engine.feed(token_ids(8, 903), 60)]
    engine.step()
    now = time.monotonic()
    waiting = engine.feed(ids, ANSWER_TOKENS, time_s=now, rid=rid)
    short = engine.feed(token_ids(10, 904), 60, time_s=now)
    running += [short, engine.feed(token_ids(10, 905), 6, time_s=now + 5.0)]
    while short in engine.scheduler.waiting_queue:
        engine.step()
    assert waiting in engine.scheduler.waiting_queue
    return running


def retry(start: SchedulerStart) -> dict[str, Any]:
    """Send another prompt under the name of an aborted one; then abort a waiting prompt and send it again,
    while others arrive and are served. ``answered_before``: the number of answers before its own."""
    engine = start()
    prompts = [token_ids(300, 1), token_ids(300, 2)]
    engine.serve([alone_req := engine.feed(prompts[1], ANSWER_TOKENS)])
    running = overtaken_by_short(engine, prompts[0], "job-7")
    engine.abort("job-7")
    other_req = engine.feed(prompts[1], ANSWER_TOKENS, rid="job-7")
    engine.serve([other_req, engine.feed(token_ids(20, 5), ANSWER_TOKENS), *running])
    prompt = token_ids(1200, 1)
    running = overtaken_by_short(engine, prompt, "given-up")
    engine.abort("given-up")
    resent = engine.feed(prompt, ANSWER_TOKENS, rid="again")
    answered = 0
    while answered < MAX_ANSWERS and not resent.finished():
        answered += sum(req.finished() for req in running)
        running = [req for req in running if not req.finished()]
        while len(running) < 3:
            running.append(engine.feed(token_ids(500, answered + len(running)), ANSWER_TOKENS))
        engine.step()
    equal = list(other_req.output_ids) == list(alone_req.output_ids)
    return {"equal": equal, "answered": resent.finished(), "answered_before": answered}


CALL_COUNTS: Counter[str] = Counter()
"""Calls of hooks and of the tree's methods, by name."""


def count_calls() -> None:
    from sglang_canopy.radix.cache import CanopyRadixCache
    from sglang_canopy.radix.core import CanopyTreeCore
    from sglang_canopy.server.start.hooks import HOOKS

    def count_call(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            CALL_COUNTS[name] += 1
            return function(*args, **kwargs)

        return call

    for hook in HOOKS:
        name = hook.target.rpartition(".")[2]
        object.__setattr__(hook, "function", count_call(name, hook.function))
    for owner, name in (
        (CanopyTreeCore, "match_prefix"),
        (CanopyTreeCore, "begin_insert"),
        (CanopyRadixCache, "_evict_components"),
    ):
        setattr(owner, name, count_call(name, getattr(owner, name)))


def count_reads(start: SchedulerStart) -> dict[str, Any]:
    """Count reads of tensors between arrival and answer by function: ``ours`` and ``sglangs``."""
    from sglang_canopy.server.scheduler.admission import take_times

    count_calls()
    engine = start()
    prompts = continuing_prompts(14, 0, max_shared_tokens=600)
    arm_gate(engine)
    tighten_budgets(engine)
    controller, load_calls = engine.scheduler.tree_cache.cache_controller, []
    original_load = controller.load
    controller.load = lambda *args, **kwargs: load_calls.append(1) or original_load(*args, **kwargs)
    answered = 0
    with HostReads() as reads:
        for turn in range(2):
            requests = [
                engine.feed(ids, ANSWER_TOKENS, priority=i % 2, rid=f"{turn}-{i}")
                for i, ids in enumerate(prompts)
            ]
            engine.step()
            engine.abort(f"{turn}-3")
            del requests[3]
            for step in range(MAX_STEPS):
                engine.step()
                take_times(engine.scheduler, [repr(time.monotonic() + step)])
                if all(req.finished() for req in requests):
                    break
            answered += sum(req.finished() for req in requests)
    ours, sglangs = reads.reads_of(*CANOPY_PACKAGES), reads.reads_of(SGLANG_PACKAGE)
    counts = {"calls": dict(CALL_COUNTS), "answered": answered, "loads": len(load_calls)}
    return {"ours": ours, "sglangs": sglangs, **counts}


SAMPLE_COUNT, CONVERSATION_COUNT = 4, 3


def teach_policies(start: SchedulerStart) -> dict[str, Any]:
    """Send requests from which the policies learn to a server with ``--max-queued-requests 2``."""
    from sglang_canopy.radix.counters import REFUSALS

    engine = start()
    core = engine.scheduler.tree_cache.tree_core
    turns = []
    for conversation in range(CONVERSATION_COUNT):
        stamp = {"samples": SAMPLE_COUNT, "conversation": f"c{conversation}"}
        ids, time_s = token_ids(300, conversation + 1), 10.0 * conversation + 1.0
        engine.serve([engine.feed(ids, 0, time_s=time_s, stamp=stamp)])
        samples = [engine.feed(ids, 4, time_s=time_s, stamp=stamp) for _ in range(2)]
        engine.step()
        samples += [engine.feed(ids, 4, time_s=time_s, stamp=stamp) for _ in range(2)]
        engine.serve(samples)
        turns += [req.canopy.request.turn for req in samples]
    after_samples = core.live.learner.model.reuse_count
    refused_req, last_req = refuse_requests(engine)
    rows = core.live.counters.all_counts()
    engine.scheduler.tree_cache.sanity_check()
    return {
        "turns": turns,
        "samples_learnt": after_samples,
        "refused_at_the_limit": refused_req is None,
        "retried_turn": last_req.canopy.request.turn,
        "returns": core.live.learner.model.reuse_count,
        "requests": sum(row.requests for row in rows),
        "prompt_tokens": sum(row.prompt_tokens for row in rows),
        "metered_tokens": core.live.meter.prompt_tokens,
        "refused": dict(zip(REFUSALS, core.live.counters.refusal_counts)),
        "warm_ups": len(core.requests.samples),
    }


def refuse_requests(engine: SteppedScheduler) -> tuple[Any, Any]:
    """Send four requests that are not admitted, and three that are. Return a refused one and the last one."""
    prompt = token_ids(300, 90)
    for attempt in range(2):  # aborted while it waits
        engine.feed(prompt, 4, time_s=100.0 + attempt, stamp={"conversation": "r"}, rid="gone")
        engine.abort("gone")
    engine.serve([engine.feed(token_ids(5000, 91), 4, time_s=110.0)])  # too long
    waiting = [engine.feed(token_ids(100, 92 + i), 4, time_s=120.0) for i in range(2)]
    # The queue is full.
    refused_req = engine.feed(prompt, 4, time_s=121.0, stamp={"conversation": "r"})
    engine.serve(waiting)
    last_req = engine.feed(prompt, 4, time_s=130.0, stamp={"conversation": "r"})
    engine.serve([last_req])
    return refused_req, last_req


def embed(start: SchedulerStart) -> list[tuple[bool, int]]:
    """Request an embedding of one prompt thrice; return whether each is answered, and its cached tokens."""
    from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    engine = start()
    (params := SamplingParams(max_new_tokens=0)).normalize(None)
    fields = {"input_text": None, "mm_inputs": None, "token_type_ids": None}
    ids, waiting = array("q", token_ids(300, 1)), engine.scheduler.waiting_queue
    for number in range(3):
        message = TokenizedEmbeddingReqInput(
            rid=f"e{number}", input_ids=ids, sampling_params=params, **fields
        )
        engine.scheduler.process_input_requests([message])
    reqs = [*waiting]
    engine.serve(reqs)
    return [(req.finished(), req.cached_tokens) for req in reqs]


def observe_refusals(start: SchedulerStart) -> dict[str, Any]:
    """Return the counts of refusals and metered tokens with ``--canopy-observe``."""
    from sglang_canopy.radix.counters import INVALID, REFUSALS
    from sglang_canopy.server.scheduler.observer import observer_of

    engine = start()
    _, last_req = refuse_requests(engine)
    del last_req.output_ids[:]  # only its end was seen: an answered request is not refused later
    observer = observer_of(engine.scheduler)
    assert observer is not None
    observer.refuse(last_req, INVALID)
    refused = dict(zip(REFUSALS, observer.refusal_counts, strict=True))
    return {"refused": refused, "metered_tokens": observer.meter.prompt_tokens}


def read_meter(start: SchedulerStart) -> dict[str, Any]:
    """Return the meter of a scheduler, ours or observed, whose cache is far smaller than the prompts."""
    from sglang_canopy.server.scheduler.observer import observer_of

    engine = start()
    together = answer_alone_and_together(engine, continuing_prompts(48, 3, max_shared_tokens=600))
    observing, cache = observer_of(engine.scheduler), engine.scheduler.tree_cache
    meter = cache.tree_core.live.meter if observing is None else observing.meter
    cache.sanity_check()
    return {**together, "meter": meter.stats()}
