"""Defer a request by a step if an earlier request is about to compute its prefix.

Two requests admitted together both compute an uncached prefix that they share. SGLang's cache-aware
policies sort the second request last (``_compute_prefix_matches``); this module omits it from the
step until the prefix is in the tree, and keeps its position. A request is deferred only for an
earlier request, and only if the shared part costs more than an extra step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

from sglang_canopy.schedule.line import Waiting

PLACES = 16
"""Positions at the head of the queue that are checked; a step rarely admits more."""

Path = Sequence[Hashable]
"""Hashes of a prompt's whole blocks, each covering the tenant and the prefix up to it."""


def deferred(
    order: Iterable[Waiting],
    path_of: Callable[[Any], Path],
    begun: Collection[Path],
    block_tokens: int,
    least_tokens: float,
) -> dict[int, int | None]:
    """Map the number of each request to defer to the number of the request it waits for.

    ``order`` is in admission order. The value is ``None`` if the prefix belongs to ``begun``:
    admitted requests whose prompts are not in the tree yet. For a shared uncached prefix shorter
    than ``least_tokens``, no request is deferred.
    """
    blocks = max(1, -int(-least_tokens // block_tokens))
    first: dict[Hashable, int] = {}
    found: dict[int, int | None] = {}
    for waiting in order:
        path, at = path_of(waiting.about), waiting.prefill.cached // block_tokens + blocks - 1
        if at >= len(path):
            continue
        mark = path[at]
        if any(at < len(other) and other[at] == mark for other in begun):
            found[waiting.number] = None
        elif mark in first:
            found[waiting.number] = first[mark]
        else:
            first[mark] = waiting.number
    return found
