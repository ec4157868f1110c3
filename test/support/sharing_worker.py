"""Shorter requests that share a long prompt's steps, some of which became shorter meanwhile.

    cd test && python -m support.sharing_worker MODEL ARGUMENT...

Prints one JSON object; ``shared`` below says what.
"""

from __future__ import annotations

import sys
from typing import Any

from support.prompts import token_ids
from support.scheduler_worker import InProcess, run

SHORT, SHARED = 8, 4
"""Tokens of a short prompt, and of those how many all short ones begin with."""


def shared(engine: InProcess) -> dict[str, Any]:
    """``answered``: requests answered. ``beside``: those let in beside the long prompt."""
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


if __name__ == "__main__":
    run(sys.argv[1:], shared)
