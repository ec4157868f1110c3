"""Answers of SGLang's own scheduler with a small model, in one process without HTTP.

    cd test && python -m support.scheduled_answers MODEL ARGUMENT... < PROMPTS

Reads a JSON list of rounds, each a list of prompts (token ids) that arrive at once; a round starts when
the scheduler is idle. Prints ``answers`` and ``found`` (cached tokens by tier) of each prompt, in order,
and the ``victims`` of the device.
"""

import json
import sys
from pathlib import Path

from support.scheduler_worker import InProcess, end_with

TOKENS = 6


def main() -> None:
    import torch

    engine = InProcess(Path(sys.argv[1]), sys.argv[2:])
    answers, found = [], []
    with torch.no_grad():
        for prompts in json.loads(sys.stdin.read()):
            reqs = [engine.feed(ids, TOKENS) for ids in prompts]
            engine.serve(reqs)
            engine.step()
            answers += [list(req.output_ids) for req in reqs]
            found += [
                [req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage]
                for req in reqs
            ]
    core = engine.scheduler.tree_cache.tree_core
    victims = core.live.counters.victims.sum[0] if hasattr(core, "live") else None
    engine.scheduler.tree_cache.sanity_check()
    end_with({"answers": answers, "found": found, "victims": victims})


if __name__ == "__main__":
    main()
