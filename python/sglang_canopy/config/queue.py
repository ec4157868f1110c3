"""The order of a server's waiting queue: its options."""

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
    """Flags about requests that wait to be scheduled."""

    queue_order: str = declare(
        SGLANG,
        FLAG,
        "Who is let in next: as --schedule-policy says, or the request whose prefill takes least "
        "seconds, as long as nobody is passed for more than its budget (--canopy-max-wait-factor). "
        "Keeps SGLang's priorities; tenants share time.",
        choices=(SGLANG, BOUNDED_SHORTEST),
        hidden=True,
    )
    max_wait_factor: float = declare(
        MAX_WAIT_FACTOR,
        "--canopy-max-wait-factor",
        "With bounded-shortest: how many times as long as first come, first served a request may "
        "wait because of shorter ones that came later. To this come ten times its own prefill, and "
        "two seconds. 1: its wait depends on how long it is itself, and on how much came before it.",
        metavar="FACTOR",
        low=1.0,
        high=1000.0,
        hidden=True,
    )
    protect_waiting: str = declare(
        "on",
        "--canopy-protect-waiting",
        "Protect cached prefixes of waiting requests from their arrival on, those first in the "
        "queue first, within the budget of what may be protected. off: from their first lookup "
        "on, which under first come, first served is at the head of the queue.",
        choices=("on", "off"),
        hidden=True,
    )

    def __post_init__(self) -> None:
        declared.check(self)
        if self.max_wait_factor != MAX_WAIT_FACTOR and self.queue_order != BOUNDED_SHORTEST:
            raise CanopyError(f"--canopy-max-wait-factor needs {FLAG} {BOUNDED_SHORTEST}")
