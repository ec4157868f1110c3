"""``--radix-eviction auto``: one option for every part that improves results.

Each part is also a separate option. A part that the user has set is not changed. A part that this
server cannot have is omitted, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_canopy.config.queue import BOUNDED_SHORTEST, QUEUE_FLAG
from sglang_canopy.config.refusals import refusing_setups
from sglang_canopy.config.server_options import AutoPart
from sglang_canopy.config.setups import QUEUE
from sglang_canopy.config.whatif import WHATIF_FLAG
from sglang_canopy.policy.registry import AUTO

if TYPE_CHECKING:
    from sglang_canopy.config.server_options import ServerOptions

AUTO_POLICY = "wa"
"""Eviction policy while it is not below its floor."""
WRITE_POLICY_FLAG, WRITE_BACK = "--hicache-write-policy", "write_back"
_OTHER_SPELLINGS = {"--enable-hierarchical-cache": ("--enable-hicache",)}


def added_arguments(argv: Sequence[str]) -> list[str]:
    """Return what ``auto`` adds: write-back, if there is a host tier and no write policy is typed."""
    is_auto = typed_value(argv, "--radix-eviction-policy") == AUTO
    has_tiers = has_any_flag(argv, "--enable-hierarchical-cache")
    if is_auto and has_tiers and not has_any_flag(argv, WRITE_POLICY_FLAG):
        return [WRITE_POLICY_FLAG, WRITE_BACK]
    return []


def has_any_flag(argv: Sequence[str], *flags: str) -> bool:
    """Return whether a command line contains one of ``flags``, in any spelling."""
    spellings = [spelling for flag in flags for spelling in (flag, *_OTHER_SPELLINGS.get(flag, ()))]
    return not {argument.partition("=")[0] for argument in argv}.isdisjoint(spellings)


def typed_value(argv: Sequence[str], flag: str) -> str | None:
    """Return the last value typed after ``flag``, or ``None``."""
    value = None
    for index, argument in enumerate(argv):
        if argument == flag and index + 1 < len(argv):
            value = argv[index + 1]
        elif argument.startswith(f"{flag}="):
            value = argument[len(flag) + 1 :]
    return value


def queue_defaults(server_args: Any) -> Mapping[str, Any]:
    """Return the fields of ``QueueFlags`` that ``auto`` sets on this server; typed flags take
    precedence."""
    return {"queue_order": BOUNDED_SHORTEST} if _order_refusal(server_args) is None else {}


def part_states(
    server_args: Any, options: ServerOptions, *build_context: Any
) -> tuple[AutoPart, ...]:
    """Return the state of all parts on a server that was started with ``auto``. ``server_args``:
    checked arguments. ``build_context``: SGLang's ``TreeCacheBuildContext`` if it exists."""
    order, meter = options.queue.queue_order, options.meter
    assert meter is not None, "auto always measures"
    has_host = server_args.enable_hierarchical_cache
    write_policy = server_args.hicache_write_policy
    is_floor_off = meter.floor != "on"
    order_refusal = write_refusal = floor_refusal = None
    if order != BOUNDED_SHORTEST:
        order_refusal = _order_refusal(server_args, *build_context)
        order_refusal = order_refusal or _typed_flag_refusal(QUEUE_FLAG, order)
    if not has_host:
        write_refusal = ("there is no host tier", "add --enable-hierarchical-cache")
    elif write_policy != WRITE_BACK:
        write_refusal = _typed_flag_refusal(WRITE_POLICY_FLAG, write_policy)
    if is_floor_off:
        floor_refusal = ("floor=off was given", f"leave out floor=off of {WHATIF_FLAG}")
    return (
        AutoPart("policy", True, server_args.radix_eviction_policy),
        _make_part("order", order_refusal, order),
        _make_part("write policy", write_refusal, write_policy if has_host else "none"),
        _make_part("floor", floor_refusal, "off" if is_floor_off else "canopy-lru"),
        AutoPart("meter", True, ", ".join(meter.policies)),
    )


def _make_part(name: str, refusal: tuple[str, str] | None, runs: str) -> AutoPart:
    """Return a part, active without a ``refusal``: a reason, and the change that removes it."""
    return AutoPart(name, refusal is None, runs, *(refusal or ()))


def _typed_flag_refusal(flag: str, value: str) -> tuple[str, str]:
    return f"{flag} {value} was given", f"leave out {flag}"


def _order_refusal(server_args: Any, *build_context: Any) -> tuple[str, str] | None:
    """Return the reason to keep SGLang's queue order, and its remedy; or ``None``."""
    if server_args.schedule_policy != "fcfs":
        return _typed_flag_refusal("--schedule-policy", server_args.schedule_policy)
    refusals = list(refusing_setups(QUEUE, server_args, *build_context))
    if not refusals:
        return None
    remedies = dict.fromkeys(setup.remedy() for _, setup in refusals if setup.remedy())
    return refusals[0][0], ", and ".join(remedies)
