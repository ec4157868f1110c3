"""Requests from which the policies learn in SGLang's own scheduler: samples (n > 1), refusals, retries.

    cd test && python -m support.teaching_worker MODEL ARGUMENT...

Prints one JSON object. The server has ``--max-queued-requests 2``. With ``--canopy-observe``, only the
counts of refusals and metered tokens.
"""

import sys
from typing import Any

from sglang_canopy.radix.counters import INVALID, REFUSALS
from sglang_canopy.server.scheduler import observer
from support.prompts import token_ids
from support.scheduler_worker import InProcess, run

SAMPLES = 4
TALKS = 3


def teach(engine: InProcess) -> dict[str, Any]:
    core = engine.scheduler.tree_cache.tree_core
    turns = []
    for talk in range(TALKS):
        stamp = {"samples": SAMPLES, "conversation": f"c{talk}"}
        ids, at = token_ids(300, talk + 1), 10.0 * talk + 1.0
        engine.serve([engine.feed(ids, 0, at=at, stamp=stamp)])
        samples = [engine.feed(ids, 4, at=at, stamp=stamp) for _ in range(2)]
        engine.step()
        samples += [engine.feed(ids, 4, at=at, stamp=stamp) for _ in range(2)]
        engine.serve(samples)
        turns += [req.canopy.turn for req in samples]
    after_samples = core.live.learner.model.samples
    refused, last = refusals(engine)
    rows = core.live.counters.rows()
    engine.scheduler.tree_cache.sanity_check()
    return {
        "turns": turns,
        "samples_learnt": after_samples,
        "refused_at_the_limit": refused is None,
        "retried_turn": last.canopy.turn,
        "returns": core.live.learner.model.samples,
        "requests": sum(row.requests for row in rows),
        "prompt_tokens": sum(row.prompt_tokens for row in rows),
        "metered_tokens": core.live.meter.sums["prompt_tokens"],
        "refused": dict(zip(REFUSALS, core.live.counters.refused)),
        "warm_ups": len(core.requests.samples),
    }


def refusals(engine: InProcess) -> tuple[Any, Any]:
    """Four requests that are not admitted, and three that are. Return a refused one and the last."""
    prompt = token_ids(300, 90)
    for attempt in range(2):  # aborted while it waits
        engine.feed(prompt, 4, at=100.0 + attempt, stamp={"conversation": "r"}, rid="gone")
        engine.abort("gone")
    engine.serve([engine.feed(token_ids(5000, 91), 4, at=110.0)])  # too long
    waiting = [engine.feed(token_ids(100, 92 + i), 4, at=120.0) for i in range(2)]
    refused = engine.feed(prompt, 4, at=121.0, stamp={"conversation": "r"})  # the queue is full
    engine.serve(waiting)
    last = engine.feed(prompt, 4, at=130.0, stamp={"conversation": "r"})
    engine.serve([last])
    return refused, last


def observe(engine: InProcess) -> dict[str, Any]:
    _, last = refusals(engine)
    del last.output_ids[:]  # only its end was seen: an answered request is not refused later
    observed = observer.observer_of(engine.scheduler)
    assert observed is not None
    observed.refuse(last, INVALID)
    return {
        "refused": dict(zip(REFUSALS, observed.refused, strict=True)),
        "metered_tokens": observed.meter.sums["prompt_tokens"],
    }


if __name__ == "__main__":
    run(sys.argv[1:], observe if "--canopy-observe" in sys.argv else teach)
