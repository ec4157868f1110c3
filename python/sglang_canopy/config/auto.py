"""``--radix-eviction auto``: one option for all parts that win.

Each part is an option of its own. A part that the user has set is not changed. A part that this
server cannot have is omitted, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_canopy.admission.settings import AUTO as GATE_AUTO
from sglang_canopy.admission.settings import GateSettings
from sglang_canopy.config.plan_arguments import typed, value
from sglang_canopy.config.queue import BOUNDED_SHORTEST
from sglang_canopy.config.refusals import GATE, QUEUE, unsupported
from sglang_canopy.policy.registry import AUTO

POLICY = "wa"
"""Eviction policy while it is not below its floor."""
WRITE_POLICY, WRITTEN = "--hicache-write-policy", "write_back"


def arguments(argv: Sequence[str]) -> list[str]:
    """Return the SGLang arguments that ``auto`` adds: a host tier that duplicates nothing."""
    is_auto = value(argv, "--radix-eviction-policy") == AUTO
    if is_auto and typed(argv, "--enable-hierarchical-cache") and not typed(argv, WRITE_POLICY):
        return [WRITE_POLICY, WRITTEN]
    return []


@dataclass(frozen=True, slots=True)
class Parts:
    """Settings of ``auto`` for a server, by the fields of the flags' classes; typed flags take
    precedence."""

    queue: Mapping[str, Any]
    """Fields of ``QueueFlags``."""
    requests: Mapping[str, Any]
    """Fields of ``RequestOptions``."""
    left_out: Mapping[str, str]
    """Parts that this server cannot have, with the reason."""


def parts(server_args: Any) -> Parts:
    """Return the parts that this server can have."""
    no_order, no_gate = _no_order(server_args), _without_way_out(GATE, server_args)
    left_out = {"order": no_order, "gate": no_gate}
    return Parts(
        {"queue_order": BOUNDED_SHORTEST} if no_order is None else {},
        {"session_gate": GateSettings(mode=GATE_AUTO)} if no_gate is None else {},
        {part: why for part, why in left_out.items() if why is not None},
    )


def _no_order(server_args: Any) -> str | None:
    """Return the reason to keep SGLang's queue order, or ``None``."""
    if server_args.schedule_policy != "fcfs":
        return f"--schedule-policy {server_args.schedule_policy} was given"
    return _without_way_out(QUEUE, server_args)


def _without_way_out(feature: str, server_args: Any) -> str | None:
    why = unsupported(feature, server_args)
    return None if why is None else why.partition(";")[0]
