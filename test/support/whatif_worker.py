"""A scheduler with the what-if meter, or one that is only observed.

    cd test && python -m support.whatif_worker MODEL ARGUMENT...

Prints one JSON object. The cache is far smaller than the traffic's prompts.
"""

import sys
from typing import Any

from support.prompts import continuing_prompts
from support.scheduler_worker import InProcess, run

REQUESTS = 48


def measured(engine: InProcess) -> dict[str, Any]:
    """Every request alone, then all of them together."""
    from sglang_canopy.server.scheduler.observer import observer_of

    asked = continuing_prompts(REQUESTS, seed=3, most_shared=600)
    alone = []
    for ids in asked:
        engine.serve([req := engine.feed(ids, 4)])
        alone.append(list(req.output_ids))
    together, scheduler = [engine.feed(ids, 4) for ids in asked], engine.scheduler
    engine.serve(together)
    observer = observer_of(scheduler)
    meter = scheduler.tree_cache.tree_core.live.meter if observer is None else observer.meter
    scheduler.tree_cache.sanity_check()
    return {
        "equal": [list(req.output_ids) for req in together] == alone,
        "meter": meter.stats(),
    }


if __name__ == "__main__":
    run(sys.argv[1:], measured)
