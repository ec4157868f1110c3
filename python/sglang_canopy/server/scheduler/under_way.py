"""Which requests a scheduler has, told by object: clients choose names, and use them again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def under_way(scheduler: Any, *batches: Any) -> Iterator[Any]:
    """Every ``Req`` that was let in and is not over; some may come twice.

    ``batches``: those that the scheduler is working on and has not noted on itself yet.
    """
    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req
    for batch in (scheduler.running_batch, scheduler.last_batch, *batches):
        yield from getattr(batch, "reqs", None) or ()
