"""Options for the order of a server's waiting queue."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_canopy import declared
from sglang_canopy.declared import declare
from sglang_canopy.errors import CanopyError
from sglang_canopy.schedule.bounded_shortest import MAX_WAIT_FACTOR

SGLANG, BOUNDED_SHORTEST = "sglang", "bounded-shortest"
FLAG = "--canopy-queue-order"


@dataclass(frozen=True, slots=True)
class QueueFlags:
    """Flags for requests that wait to be scheduled."""

    queue_order: str = declare(
        SGLANG,
        FLAG,
        "Order of admission: by --schedule-policy, or the request with the shortest prefill first, "
        "within the overtaking budget of older requests (--canopy-max-wait-factor). Tenants take turns.",
        choices=(SGLANG, BOUNDED_SHORTEST),
        hidden=True,
    )
    max_wait_factor: float = declare(
        MAX_WAIT_FACTOR,
        "--canopy-max-wait-factor",
        "With bounded-shortest: a request may wait this many times as long as under first come, "
        "first served, plus ten times its own prefill and two seconds.",
        metavar="FACTOR",
        low=1.0,
        high=1000.0,
        hidden=True,
    )
    protect_waiting: str = declare(
        "on",
        "--canopy-protect-waiting",
        "Protect cached prefixes of waiting requests from eviction, within a budget, from arrival "
        "on. off: from the first lookup on.",
        choices=("on", "off"),
        hidden=True,
    )

    def __post_init__(self) -> None:
        declared.check(self)
        if self.max_wait_factor != MAX_WAIT_FACTOR and self.queue_order != BOUNDED_SHORTEST:
            raise CanopyError(f"--canopy-max-wait-factor needs {FLAG} {BOUNDED_SHORTEST}")
