"""Who should wait a step: a request whose prefix somebody before it is about to compute.

Two requests that are let in together and share what is not cached both compute it. SGLang's cache
aware orders sort the second one last (``_compute_prefix_matches``); here it is left out of the step,
until what it shares is in the tree, and keeps its place. Only who comes after the other one in the
queue is left out, and only for as much as a step of its own costs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

from sglang_canopy.schedule.line import Waiting

PLACES = 16
"""Places at the head of the queue that are looked at: few more are let in at once."""

Path = Sequence[Hashable]
"""A prompt's whole blocks; equal ones at one place mean equal prefixes of one tenant."""


def deferred(
    order: Iterable[Waiting],
    path_of: Callable[[Any], Path],
    begun: Collection[Path],
    block_tokens: int,
    least_tokens: float,
) -> dict[int, int | None]:
    """Of ``order``, first to be let in first: who should wait -> for whom, by number; ``None`` is
    one of ``begun``, requests that were let in and are not in the tree yet.

    No one waits for less than ``least_tokens`` that are not cached.
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
