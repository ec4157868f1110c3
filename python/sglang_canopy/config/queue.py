"""Options for the order of a server's waiting queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_canopy import declared
from sglang_canopy.config.refusals import unsupported_reason
from sglang_canopy.config.setups import QUEUE
from sglang_canopy.declared import declare, option_of, typed_values
from sglang_canopy.errors import CanopyError

SGLANG, BOUNDED_SHORTEST = "sglang", "bounded-shortest"
QUEUE_FLAG = "--canopy-queue-order"


@dataclass(frozen=True, slots=True)
class QueueFlags(declared.Checked):
    """Flags for requests that wait to be scheduled."""

    queue_order: str = declare(
        SGLANG,
        QUEUE_FLAG,
        "Order of admission: by --schedule-policy, or the request that takes the fewest seconds first, "
        "while an older one is overtaken by at most ten times its own work and two seconds. Tenants "
        "have equal shares.",
        choices=(SGLANG, BOUNDED_SHORTEST),
        hidden=True,
    )


def check_flags(
    server_args: Any, args: Any, is_canopy: bool, unless_given: Mapping[str, Any]
) -> QueueFlags:
    """Return the options, checked against the rest of the command line. Raises ``CanopyError``.
    ``is_canopy``: whether the device's policy is one of Canopy's. ``unless_given``: defaults of fields
    that are not on the command line."""
    typed_flags = typed_values(QueueFlags, args)
    options = QueueFlags(**{**unless_given, **typed_flags})
    if typed_flags and not is_canopy:
        flag = option_of(QueueFlags, next(iter(typed_flags))).flag
        raise CanopyError(f"{flag} needs --radix-eviction with a Canopy policy, such as wa")
    if options.queue_order == BOUNDED_SHORTEST:
        if server_args.schedule_policy != "fcfs":
            raise CanopyError(
                f"{QUEUE_FLAG} {BOUNDED_SHORTEST} replaces --schedule-policy "
                f"{server_args.schedule_policy}; drop one"
            )
        refuse_unsupported(options, server_args)
    return options


def refuse_unsupported(options: QueueFlags, *configured: Any) -> None:
    """Raise ``CanopyError`` if this server cannot have the queue order of ``options``."""
    if options.queue_order == BOUNDED_SHORTEST:
        refusal = unsupported_reason(QUEUE, *configured)
        if refusal:
            raise CanopyError(f"{QUEUE_FLAG} {BOUNDED_SHORTEST}: {refusal}")
