"""SGLang's own scheduler with a hybrid model in one process, a pool too small for its prompts.

    cd test && python -m support.hybrid_worker MODEL KV_TOKENS ARGUMENT...

Prints one JSON object: the answers to ``conversations()`` and ``by_turn()`` one after another and to
the first all at once, and the cached tokens of each prompt, on the host as well.
"""

import sys
from pathlib import Path

from support.hybrid_models import ANSWER, by_turn, conversations
from support.scheduler_worker import InProcess, end_with


def main() -> None:
    import torch

    engine = InProcess(Path(sys.argv[1]), sys.argv[3:], int(sys.argv[2]))
    cache = engine.scheduler.tree_cache
    found: dict[str, object] = {"answers": [], "cached": [], "host": []}
    with torch.no_grad():
        for number, ids in enumerate(conversations() + by_turn()):
            engine.serve([req := engine.feed(ids, ANSWER, at=float(number))])
            found["answers"].append(list(req.output_ids))  # type: ignore[attr-defined]
            found["cached"].append(req.cached_tokens)  # type: ignore[attr-defined]
            found["host"].append(req.cached_tokens_host)  # type: ignore[attr-defined]
            cache.sanity_check()
        together = [engine.feed(ids, ANSWER, at=100.0) for ids in conversations()]
        engine.serve(together)
    cache.sanity_check()
    found["together"] = [list(req.output_ids) for req in together]
    found["core"] = type(cache.tree_core).__name__
    found["components"] = [kind.name for kind in cache.tree_components]
    end_with(found)


if __name__ == "__main__":
    main()
