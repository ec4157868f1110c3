"""What copies ahead of eviction are told of a scheduler: how many tokens enter next."""

from __future__ import annotations

from itertools import islice
from typing import Any

from sglang_canopy.policy.copy_window import LOOKED_AHEAD, STEPS_AHEAD


def expect(scheduler: Any) -> None:
    """Tell the tree what the next steps take from the device, as far as it is known.

    Call once a batch has been chosen. The queue, the prompt in the middle of its chunks and what
    was found of each in the tree are equal on all tensor-parallel ranks.
    """
    ahead = getattr(getattr(scheduler.tree_cache, "tree_core", None), "ahead", None)
    if ahead is not None:
        step = scheduler.chunked_prefill_size or scheduler.max_prefill_tokens
        ahead.expect(due_tokens(scheduler.chunked_req, scheduler.waiting_queue, step))


def due_tokens(chunked: Any, waiting: Any, step_tokens: int) -> int:
    """Tokens that the next ``STEPS_AHEAD`` steps allocate, of at most ``step_tokens`` each.

    ``chunked``: the ``Req`` that is half computed, or ``None``; ``waiting``: those in the queue,
    first to be let in first, with what was found of them when they were last looked up.
    """
    most = STEPS_AHEAD * step_tokens
    due = 0 if chunked is None else _length(chunked) - chunked.extend_end
    for req in islice(waiting, LOOKED_AHEAD):
        if due >= most:
            break
        due += max(_length(req) - req.prefix_len, 0)
    return min(due, most)


def _length(req: Any) -> int:
    return len(req.origin_input_ids) + len(req.output_ids)
