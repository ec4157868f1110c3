"""Select the part of a server's log to plan from, and compare the new plan with the old.

Two guesses at the near future: the last hours, or the same hours a week ago. "Now" is the last
request of the log, so that a plan depends on the log alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from canopy_lab.plan.objective import Row
from canopy_lab.plan.space import Configuration
from canopy_lab.sim.compact import CompactTrace
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError

WEEK_S = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Slot:
    """The last ``hours`` of a log, or those ``hours`` that began a week before its end."""

    hours: float
    last_week: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.hours <= 24 * 7:
            raise CanopyError(f"a slot must be above 0 and at most 168 hours, got {self.hours}")

    def bounds(self, end_s: float) -> tuple[float, float]:
        """From and to, on the log's clock, for a log that ends at ``end_s``."""
        if self.last_week:
            return end_s - WEEK_S, end_s - WEEK_S + self.hours * 3600
        return end_s - self.hours * 3600, end_s

    def __str__(self) -> str:
        if self.last_week:
            return f"the {self.hours:g} h from now on, a week ago"
        return f"the last {self.hours:g} h"


def cut(trace: Iterable[TraceRequest], slot: Slot) -> list[TraceRequest]:
    """The slot's requests, their clock from the slot's first.

    Raises ``CanopyError`` when there are none. Memory: the requests of a week, or of the slot.
    """
    keep: list[TraceRequest] = []
    first_s: float | None = None
    span_s = WEEK_S if slot.last_week else slot.hours * 3600
    for request in trace:
        first_s = request.time_s if first_s is None else first_s
        keep.append(request)
        if len(keep) % 4096 == 0:
            keep = [r for r in keep if r.time_s >= request.time_s - span_s]
    if not keep:
        raise CanopyError("the log holds no finished request yet; wait, or give another --trace")
    end_s = keep[-1].time_s
    low, high = slot.bounds(end_s)
    chosen = [r for r in keep if low <= r.time_s <= high]
    if not chosen or (slot.last_week and first_s is not None and low < first_s):
        have_h = (end_s - (first_s or 0.0)) / 3600
        raise CanopyError(
            f"the log has no requests for {slot}: it spans {have_h:.1f} h; use --last-hours "
            "with what there is"
        )
    return list(_from_zero(chosen))


def between(trace: Sequence[TraceRequest], begin_h: float, end_h: float) -> CompactTrace:
    """The requests between two hours from the first, their clock from the first of them."""
    first_s = trace[0].time_s
    part = [r for r in trace if begin_h <= (r.time_s - first_s) / 3600 < end_h]
    return CompactTrace(_from_zero(part)) if part else CompactTrace(())


def changed(before: Configuration | None, after: Row, gain: float, before_row: Row | None) -> bool:
    """Whether a new choice is worth a new start: it differs, and costs or waits less by ``gain``.

    A re-plan whose cost and mean TTFT are both within ``gain`` of what is running is noise.
    """
    if before is None or before_row is None:
        return True
    if Configuration.from_json(after) == before:
        return False
    return any(
        abs(after[key] - before_row[key]) > gain * max(abs(before_row[key]), 1e-12)
        for key in ("cost", "mean_ttft_s")
    )


def _from_zero(requests: list[TraceRequest]) -> Iterator[TraceRequest]:
    start_s = requests[0].time_s
    for request in requests:
        yield replace(request, time_s=request.time_s - start_s)
