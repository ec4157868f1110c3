"""A scheduler whose policies are exchanged while it computes, or that is only observed.

    cd test && python -m support.whatif_worker MODEL ARGUMENT...

Prints one JSON object. The cache is far smaller than the traffic's prompts.
"""

import sys
from typing import Any

from support.prompts import continuing_prompts
from support.scheduler_worker import InProcess, run

REQUESTS = 48
CHANGES: tuple[dict[str, Any], ...] = (
    {"device": "canopy-lru"},
    {"device": "wa", "host": "canopy-lru"},
    {"device": "threshold-lru"},
    {"device": "wa"},
)


def tell(engine: InProcess, key: str) -> bool:
    """Send the scheduler a message of Canopy's, between two of its steps."""
    from sglang.srt.managers.io_struct import SetInternalStateReq

    return engine.scheduler.set_internal_state(SetInternalStateReq(server_args={key: 1})).updated


def exchanged(engine: InProcess) -> dict[str, Any]:
    """Every request alone, then all of them with exchanges between the steps."""
    from sglang_canopy.config.policy_change import change_of
    from sglang_canopy.server.scheduler.observer import observer_of
    from sglang_canopy.wire.messages import POLICY

    asked = continuing_prompts(REQUESTS, seed=3, most_shared=600)
    alone = []
    for ids in asked:
        engine.serve([req := engine.feed(ids, 4)])
        alone.append(list(req.output_ids))
    together, told, scheduler = [engine.feed(ids, 4) for ids in asked], [], engine.scheduler
    core = getattr(scheduler.tree_cache, "tree_core", None)
    held = []
    for number, change in enumerate(CHANGES if hasattr(core, "exchange") else ()):
        while sum(req.finished() for req in together) < 8 * (number + 1):
            engine.step()
        before = len(core._node_arena)
        told.append(tell(engine, POLICY.key(change_of(change).message())))
        held.append(len(core._node_arena) == before)
    engine.serve(together)
    observer = observer_of(scheduler)
    meter = core.live.meter if observer is None else observer.meter
    scheduler.tree_cache.sanity_check()
    found = {
        "equal": [list(req.output_ids) for req in together] == alone,
        "told": told,
        "held": held,
        "meter": meter.stats(),
    }
    if hasattr(core, "exchange"):
        found["running"] = core.live.running
        found["changes"] = len(core.exchange.changes)
        found["evicted"] = core.live.counters.victims.sum[0]
        found["refused"] = not tell(engine, "canopy_policy:[")
    return found


if __name__ == "__main__":
    run(sys.argv[1:], exchanged)
