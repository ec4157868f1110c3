"""The requests of a scheduler, identified by object: clients choose names, and reuse them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def running_requests(scheduler: Any, *batches: Any) -> Iterator[Any]:
    """Yield every admitted ``Req`` that has not ended; some may occur twice.

    ``batches``: batches in progress that the scheduler does not reference yet.
    """
    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req
    for batch in (scheduler.running_batch, scheduler.last_batch, *batches):
        yield from getattr(batch, "reqs", None) or ()
