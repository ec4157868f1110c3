"""Clients that disconnect and retry, at SGLang's own scheduler in one process.

    cd test && python -m support.leaving_worker MODEL SCENARIO ARGUMENT...

Prints the result of the function ``SCENARIO`` below as one JSON object.
"""

import gc
import random
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from sglang_canopy.admission.gate import SessionGate
from sglang_canopy.admission.settings import GateSettings
from sglang_canopy.server.scheduler.session_gate import ServerGate, take_time
from sglang_canopy.server.start.seams import SEAMS
from support.bound_ledger import BoundLedger
from support.host_reads import CANOPY, SGLANG, HostReads
from support.prompts import continuing_prompts, token_ids
from support.scheduler_worker import KV_TOKENS, InProcess, run

ANSWER = 4
MAX_OTHERS = 400
MAX_STEPS = 2_000
STEPS = 300
"""Steps of a fuzz run: arrivals, disconnects and steps of the engine."""

CALLS: Counter[str] = Counter()
"""Calls of hooks and of the tree's methods, by name."""


def count_calls() -> None:
    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            CALLS[name] += 1
            return function(*args, **kwargs)

        return call

    for seam in SEAMS:
        object.__setattr__(seam, "hook", counting(seam.target.rpartition(".")[2], seam.hook))
    from sglang_canopy.radix.cache import CanopyRadixCache
    from sglang_canopy.radix.core import CanopyTreeCore

    for of, name in (
        (CanopyTreeCore, "match_prefix"),
        (CanopyTreeCore, "begin_insert"),
        (CanopyRadixCache, "_evict_components"),
    ):
        setattr(of, name, counting(name, getattr(of, name)))


def passed_by_a_short_one(engine: InProcess, ids: list[int], rid: str) -> list[Any]:
    """``ids`` waits under the name ``rid``, and the scheduler has seen it wait. Who else is there."""
    others = [engine.feed(token_ids(8, 902), 6), engine.feed(token_ids(8, 903), 60)]
    engine.step()
    now = time.monotonic()
    waits = engine.feed(ids, ANSWER, at=now, rid=rid)
    short = engine.feed(token_ids(10, 904), 60, at=now)
    others += [short, engine.feed(token_ids(10, 905), 6, at=now + 5.0)]
    while short in engine.scheduler.waiting_queue:
        engine.step()
    assert waits in engine.scheduler.waiting_queue
    return others


def retry(engine: InProcess) -> dict[str, Any]:
    """A waiting prompt is aborted and sent again while others arrive and are served. Return the number
    of others that are answered before it."""
    prompt = token_ids(1200, 1)
    passed_by_a_short_one(engine, prompt, "given-up")
    engine.abort("given-up")
    again = engine.feed(prompt, ANSWER, rid="again")
    others: list[Any] = []
    served = 0
    while served < MAX_OTHERS and not again.finished():
        done = [req for req in others if req.finished()]
        served += len(done)
        others = [req for req in others if req not in done]
        while len(others) < 3:
            others.append(engine.feed(token_ids(500, served + len(others)), ANSWER))
        engine.step()
    return {"answered": again.finished(), "others": served}


def same_name(engine: InProcess) -> dict[str, Any]:
    """A name is used again, for another prompt, between two passes of the scheduler."""
    asked = [token_ids(300, 1), token_ids(300, 2)]
    alone = []
    for ids in asked:
        engine.serve([req := engine.feed(ids, ANSWER)])
        alone.append(list(req.output_ids))
    others = passed_by_a_short_one(engine, asked[0], "job-7")
    engine.abort("job-7")
    second = engine.feed(asked[1], ANSWER, rid="job-7")
    waiting = [second, engine.feed(token_ids(20, 5), ANSWER), *others]
    for _ in range(MAX_STEPS):
        engine.step()
        if all(req.finished() for req in waiting):
            break
    return {"answered": second.finished(), "equal": list(second.output_ids) == alone[1]}


def fuzz(engine: InProcess, seed: int = 0) -> dict[str, Any]:
    """Clients arrive, disconnect at random places and retry, under the same name or another."""
    draw = random.Random(seed)
    asked = continuing_prompts(12, seed, most_shared=600)
    alone = []
    for ids in asked:
        engine.serve([req := engine.feed(ids, ANSWER)])
        alone.append(list(req.output_ids))
    counts = {"answered": 0, "aborts": 0, "retries": 0, "repeated_names": 0, "refused": 0}
    under_way: list[tuple[int, Any]] = []
    seen: list[Any] = []
    wrong = 0
    priorities = engine.scheduler.enable_priority_scheduling

    pushed_out: list[Any] = []
    tell = engine.scheduler.send_abort_output

    def told(output: Any, req: Any) -> Any:
        """SGLang tells a client that the queue's limit refuses it, or pushes it out."""
        pushed_out.append(req)
        return tell(output, req)

    engine.scheduler.send_abort_output = told
    ledger, gate = with_tight_budgets(engine), with_armed_gate(engine)

    def ask(which: int, rid: str) -> None:
        fields = {"extra_key": draw.choice([None, "a", "b"]), "rid": rid}
        if priorities:
            fields["priority"] = draw.randrange(3)
        req = engine.feed(asked[which], ANSWER, **fields)
        if req is None:
            counts["refused"] += 1
        else:
            seen.append(weakref.ref(req))
            under_way.append((which, req))
        for gone in [pair for pair in under_way if any(pair[1] is out for out in pushed_out)]:
            under_way.remove(gone)
            counts["refused"] += 1
        pushed_out.clear()

    def names() -> set[str]:
        return {req.rid for _, req in under_way}

    for number in range(STEPS):
        if len(under_way) < 10 and draw.random() < 0.5:
            ask(draw.randrange(len(asked)), f"c{number}-")
        if under_way and draw.random() < 0.3:
            which, req = under_way.pop(draw.randrange(len(under_way)))
            if not req.finished():
                rid = req.rid
                engine.abort(rid)
                counts["aborts"] += 1
                if draw.random() < 0.7:
                    counts["retries"] += 1
                    again = draw.random() < 0.5 and rid not in names()
                    counts["repeated_names"] += again
                    # The same name may now stand for another prompt.
                    other = draw.randrange(len(asked)) if again and draw.random() < 0.5 else which
                    ask(other, rid if again else f"c{number}b-")
            del req
        for _ in range(draw.randrange(3)):
            engine.step()
        take_time(engine.scheduler, [repr(time.monotonic())])
        for which, req in [pair for pair in under_way if pair[1].finished()]:
            under_way.remove((which, req))
            if req.finished_reason.to_json()["type"] == "length":
                counts["answered"] += 1
                wrong += list(req.output_ids) != alone[which]
    left = [req for _, req in under_way]
    for number in range(MAX_STEPS):
        engine.step()
        # No further arrivals: sessions that might return expire.
        take_time(engine.scheduler, [repr(time.monotonic() + number)])
        if all(req.finished() for req in left):
            break
    unserved = sum(not req.finished() for req in left)
    under_way.clear()
    left.clear()
    pushed_out.clear()
    which = req = None
    if engine.turns is not None:
        # SGLang keeps the last two overlapped batches: fill both with another request's.
        engine.serve([engine.feed(token_ids(8, 906), ANSWER)])
        take_time(engine.scheduler, [repr(time.monotonic())])
    for _ in range(3):
        engine.step()
    if ledger is not None:
        ledger.close()
        counts |= {"over_bound": ledger.over, "kept_by_budget": ledger.order.admitted_by["budget"]}
        counts |= {"fullest_percent": 100 * ledger.fullest}
    if gate is not None:
        counts["delayed_sessions"] = gate.stats()["delayed_sessions"]
    counts |= {"wrong": wrong, "unserved": unserved, **what_is_held(engine, seen)}
    return {**counts, "calls": dict(CALLS)}


def reads(engine: InProcess, seed: int = 0) -> dict[str, Any]:
    """Count reads of tensors between arrival and answer by function: ``ours`` and ``sglangs``."""
    asked = continuing_prompts(14, seed, most_shared=600)
    with_armed_gate(engine)
    with_tight_budgets(engine)
    controller, loads = engine.scheduler.tree_cache.cache_controller, []
    load = controller.load
    controller.load = lambda *about, **more: loads.append(1) or load(*about, **more)
    answered = 0
    with HostReads() as watch:
        for turn in range(2):
            came = [
                engine.feed(ids, ANSWER, priority=i % 2, rid=f"{turn}-{i}")
                for i, ids in enumerate(asked)
            ]
            engine.step()
            engine.abort(f"{turn}-3")
            del came[3]
            for number in range(MAX_STEPS):
                engine.step()
                take_time(engine.scheduler, [repr(time.monotonic() + number)])
                if all(req.finished() for req in came):
                    break
            answered += sum(req.finished() for req in came)
    return {
        "ours": watch.of(*CANOPY),
        "sglangs": watch.of(SGLANG),
        "answered": answered,
        "loads": len(loads),
        "calls": dict(CALLS),
    }


def with_armed_gate(engine: InProcess) -> SessionGate | None:
    """Replace the server's gate, which waits for thrash, by one that holds every session that does not
    fit."""
    live = engine.scheduler.tree_cache.tree_core.live
    if live.gate is not None:
        live.gate = SessionGate(GateSettings(always=True), KV_TOKENS)
        engine.scheduler.canopy_session_gate = ServerGate(live.gate)
    return live.gate


def with_tight_budgets(engine: InProcess) -> BoundLedger | None:
    """Return accounts of overtaking if the order is ours. The budgets are small enough to matter for
    these prompts of at most 1,000 tokens."""
    queue = engine.scheduler.tree_cache.canopy_queue
    if not queue.orders:
        return None
    queue.order.own, queue.order.least_s = 2.0, 0.0
    cache = engine.scheduler.tree_cache
    return BoundLedger(
        queue.order, lambda one: cache.has_ongoing_prefetch(one.about.cache_request_handle)
    )


def what_is_held(engine: InProcess, seen: list[Any]) -> dict[str, Any]:
    """Return the remaining state of a server after all clients left."""
    scheduler = engine.scheduler
    scheduler.last_batch = None
    scheduler.running_batch.chunked_req = None  # SGLang's own note of the last prompt in chunks
    gc.collect()
    cache = scheduler.tree_cache
    cache.sanity_check()
    queue = cache.canopy_queue
    gate = getattr(scheduler, "canopy_session_gate", None)
    tickets = (gate._admissible, gate._held, gate._running, gate._ungated) if gate else ()
    return {
        "requests": sum(ref() is not None for ref in seen),
        "waiting": len(scheduler.waiting_queue),
        "in_queue": len(queue._arranged) + len(queue.order),
        "in_gate": sum(map(len, tickets)) + (len(gate.gate.line) if gate else 0),
        "locked": cache.protected_size(),
        "slots": scheduler.req_to_token_pool.size - scheduler.req_to_token_pool.available_size(),
    }


if __name__ == "__main__":
    count_calls()
    run([sys.argv[1], *sys.argv[3:]], globals()[sys.argv[2]])
