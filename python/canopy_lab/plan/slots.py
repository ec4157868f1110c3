"""The last hours of a server's log.

The end is the log's last request instead of the current time, so that a plan depends on the log
alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError

MAX_HOURS = 24 * 7


def last_hours(trace: Iterable[TraceRequest], hours: float) -> list[TraceRequest]:
    """Return the requests of the trace's last ``hours``, with times relative to the first of them.

    Raises ``CanopyError`` without requests. Memory: the requests of those hours.
    """
    if not 0 < hours <= MAX_HOURS:
        raise CanopyError(f"--last-hours must be above 0 and at most {MAX_HOURS}, got {hours}")
    keep: list[TraceRequest] = []
    for request in trace:
        keep.append(request)
        if len(keep) % 4096 == 0:
            keep = [r for r in keep if r.time_s >= request.time_s - hours * 3600]
    if not keep:
        raise CanopyError("the log holds no finished request yet; wait, or give another one")
    begin_s = keep[-1].time_s - hours * 3600
    return list(_from_zero([r for r in keep if r.time_s >= begin_s]))


def _from_zero(requests: list[TraceRequest]) -> Iterator[TraceRequest]:
    start_s = requests[0].time_s
    for request in requests:
        yield replace(request, time_s=request.time_s - start_s)
