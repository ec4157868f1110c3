"""Shorter requests that share a long prompt's steps. Some became shorter while they waited.

    cd test && python -m support.sharing_worker MODEL SCENARIO ARGUMENT...

Prints the result of the function ``SCENARIO`` below as one JSON object.
"""

import sys
from typing import Any

from support.prompts import token_ids
from support.scheduler_worker import InProcess, run

SHORT, SHARED = 8, 4
"""Tokens of a short prompt, and tokens of the prefix that all short prompts share."""


def shared(engine: InProcess) -> dict[str, Any]:
    """``answered``: requests answered. ``beside``: requests admitted with the long prompt."""
    begins = token_ids(SHARED, 1)
    long = engine.feed(token_ids(2000, 2), 1)
    engine.step()
    shorts = [engine.feed([*begins, *token_ids(SHORT - SHARED, 10 + i)], 1) for i in range(60)]
    others = [engine.feed(token_ids(300, 100 + i), 1) for i in range(3)]
    engine.step()
    engine.step()
    beside = len(shorts) - sum(req in engine.scheduler.waiting_queue for req in shorts)
    assert engine.scheduler.chunked_req is long
    answered = len(engine.serve([long, *shorts, *others]))
    engine.scheduler.tree_cache.sanity_check()
    return {"answered": answered, "beside": beside}


def cached(engine: InProcess) -> dict[str, Any]:
    """The long prompt needs more than the free memory, so cached tokens must be evicted; requests that
    shared its steps would lock them. ``answered``: requests answered. ``beside``: whether one was
    admitted."""
    begins = [token_ids(300, seed) for seed in range(6)]
    engine.serve([engine.feed(ids, 1) for ids in begins])
    long = engine.feed(token_ids(2600, 10), 1)
    engine.step()
    assert engine.scheduler.chunked_req is long
    shorts = [engine.feed([*ids, *token_ids(8, 20 + i)], 4) for i, ids in enumerate(begins)]
    engine.step()
    engine.step()
    beside = len(shorts) - sum(req in engine.scheduler.waiting_queue for req in shorts)
    answered = len(engine.serve([long, *shorts]))
    engine.scheduler.tree_cache.sanity_check()
    return {"answered": answered, "beside": beside}


if __name__ == "__main__":
    run([sys.argv[1], *sys.argv[3:]], globals()[sys.argv[2]])
