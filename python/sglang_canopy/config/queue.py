"""The order of a server's waiting queue: its options."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_canopy import declared
from sglang_canopy.declared import declare
from sglang_canopy.errors import CanopyError
from sglang_canopy.schedule.response_ratio import OLDEST_SHARE

SGLANG, RESPONSE_RATIO = "sglang", "response-ratio"
FLAG = "--canopy-queue-order"


@dataclass(frozen=True, slots=True)
class QueueFlags:
    """Flags about requests that wait to be scheduled."""

    queue_order: str = declare(
        SGLANG,
        FLAG,
        "Who is let in next: as --schedule-policy says, or by the highest response ratio in "
        "seconds, (waited + cost) / cost, where cost is the predicted time of computing what is "
        "not cached and of loading what is on the host. Keeps SGLang's priorities and shares "
        "time between tenants.",
        choices=(SGLANG, RESPONSE_RATIO),
    )
    oldest_share: float = declare(
        OLDEST_SHARE,
        "--canopy-oldest-share",
        "With response-ratio: share of a tenant's time that is reserved for its oldest request, "
        "so that short ones cannot hold up a long one for ever. 0 reserves none, 1 is first come, "
        "first served.",
        metavar="SHARE",
        low=0.0,
        high=1.0,
    )
    protect_waiting: str = declare(
        "on",
        "--canopy-protect-waiting",
        "Protect cached prefixes of waiting requests from their arrival on, those first in the "
        "queue first, within the budget of what may be protected. off: from their first lookup "
        "on, which under first come, first served is at the head of the queue.",
        choices=("on", "off"),
    )

    def __post_init__(self) -> None:
        declared.check(self)
        if self.oldest_share != OLDEST_SHARE and self.queue_order != RESPONSE_RATIO:
            raise CanopyError(f"--canopy-oldest-share needs {FLAG} {RESPONSE_RATIO}")
