"""``--radix-eviction auto``: one option for every part that improves results.

Each part is also a separate option. A part that the user has set is not changed. A part that this
server cannot have is omitted, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_canopy.config.queue import BOUNDED_SHORTEST
from sglang_canopy.config.queue import FLAG as QUEUE_FLAG
from sglang_canopy.config.refusals import refusing_setups
from sglang_canopy.config.server_options import AutoPart
from sglang_canopy.config.setups import QUEUE
from sglang_canopy.config.whatif import FLAG as METER_FLAG
from sglang_canopy.policy.registry import AUTO

if TYPE_CHECKING:
    from sglang_canopy.config.server_options import ServerOptions

POLICY = "wa"
"""Eviction policy while it is not below its floor."""
WRITE_POLICY, WRITTEN = "--hicache-write-policy", "write_back"
_ALSO = {"--enable-hierarchical-cache": ("--enable-hicache",)}


def arguments(argv: Sequence[str]) -> list[str]:
    """Return the SGLang arguments that ``auto`` adds: a host tier that duplicates nothing."""
    is_auto = value(argv, "--radix-eviction-policy") == AUTO
    if is_auto and has_any(argv, "--enable-hierarchical-cache") and not has_any(argv, WRITE_POLICY):
        return [WRITE_POLICY, WRITTEN]
    return []


def has_any(argv: Sequence[str], *flags: str) -> bool:
    """Return whether a command line contains one of ``flags``, in any spelling."""
    spelt = [spelling for flag in flags for spelling in (flag, *_ALSO.get(flag, ()))]
    return any(a == flag or a.startswith(f"{flag}=") for a in argv for flag in spelt)


def value(argv: Sequence[str], flag: str) -> str | None:
    """Return the last value typed after ``flag``, or ``None``."""
    value = None
    for index, word in enumerate(argv):
        if word == flag and index + 1 < len(argv):
            value = argv[index + 1]
        elif word.startswith(f"{flag}="):
            value = word[len(flag) + 1 :]
    return value


def queue(server_args: Any) -> Mapping[str, Any]:
    """Return the fields of ``QueueFlags`` that ``auto`` sets on this server; typed flags take
    precedence."""
    return {"queue_order": BOUNDED_SHORTEST} if _no_order(server_args) is None else {}


def state(server_args: Any, options: ServerOptions, *context: Any) -> tuple[AutoPart, ...]:
    """Return the state of all parts on a server that was started with ``auto``.

    ``server_args``: checked arguments. ``context``: SGLang's ``TreeCacheBuildContext`` if it exists.
    """
    order, meter = options.queue.queue_order, options.meter
    assert meter is not None, "auto always measures"
    host = server_args.enable_hierarchical_cache
    written = server_args.hicache_write_policy
    no_floor = meter.floor != "on"
    return (
        AutoPart("policy", True, server_args.radix_eviction_policy),
        _part(
            "order",
            None
            if order == BOUNDED_SHORTEST
            else _no_order(server_args, *context) or _set_by_flag(QUEUE_FLAG, order),
            order,
        ),
        _part(
            "write policy",
            ("there is no host tier", "add --enable-hierarchical-cache")
            if not host
            else (None if written == WRITTEN else _set_by_flag(WRITE_POLICY, written)),
            written if host else "none",
        ),
        _part(
            "floor",
            ("floor=off was given", f"leave out floor=off of {METER_FLAG}") if no_floor else None,
            "off" if no_floor else "canopy-lru",
        ),
        AutoPart("meter", True, ", ".join(meter.policies)),
    )


def _part(name: str, reason: tuple[str, str] | None, runs: str) -> AutoPart:
    """Return a part that is active without a ``reason`` (and the change that removes it)."""
    return AutoPart(name, True, runs) if reason is None else AutoPart(name, False, runs, *reason)


def _set_by_flag(flag: str, value: str) -> tuple[str, str]:
    return f"{flag} {value} was given", f"leave out {flag}"


def _no_order(server_args: Any, *context: Any) -> tuple[str, str] | None:
    """Return the reason to keep SGLang's queue order, and its remedy; or ``None``."""
    if server_args.schedule_policy != "fcfs":
        return _set_by_flag("--schedule-policy", server_args.schedule_policy)
    refusals = list(refusing_setups(QUEUE, server_args, *context))
    if not refusals:
        return None
    remedies = dict.fromkeys(setup.remedy() for _, setup in refusals if setup.remedy())
    return refusals[0][0], ", and ".join(remedies)
