"""Describes the state of ``--radix-eviction auto`` in one line, from a rank's status."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sglang_canopy.whatif.total import in_words as meter_in_words

logger = logging.getLogger(__name__)

EVERY_S = 60.0


def in_words(status: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> str:
    """Return the line. ``status``: from ``Status``. ``parts``: as in ``config.auto_part.Part``."""
    off = {part["name"]: part["why"] for part in parts if not part["active"]}
    return "; ".join((_policy(status), _order(status, off), *_gate(status["session_gate"])))


def _policy(status: Mapping[str, Any]) -> str:
    meter = status["whatif"]
    if meter is None:
        return f"policy {status['running']}"
    floor = meter["floor"]
    if floor is None or not floor["behind"]:
        return meter_in_words(meter)
    return f"{meter_in_words(meter)}, instead of {floor['policy']}, which is behind it"


def _order(status: Mapping[str, Any], off: Mapping[str, str]) -> str:
    if "order" in off:
        return f"SGLang's order of the queue ({off['order']})"
    queue = status["queue"]
    if queue is None or queue["admitted"] is None:
        return "SGLang's order of the queue"
    admitted = ", ".join(f"{count} as {why}" for why, count in queue["admitted"].items())
    return f"order {queue['order']}: {queue['waiting_requests']} waiting, admitted {admitted}"


def _gate(gate: Mapping[str, Any] | None) -> Iterator[str]:
    if gate is None:
        return
    lost = f"{100 * gate['thrash_share']:.0f} % of agents' prefill recomputes evicted KV"
    if not gate["armed"]:
        yield f"gate off: {lost}"
        return
    waiting, paused = gate["waiting_sessions"], gate["paused_sessions"]
    yield f"gate on: {lost}; {waiting} sessions waiting, {paused} paused"


class AutoLine:
    """Reports the state of ``auto`` in every status, and once a minute in the log."""

    def __init__(self, parts: Sequence[Mapping[str, Any]]) -> None:
        self._parts = parts
        self._next = -math.inf

    def add_to(self, status: dict[str, Any], now: float) -> None:
        """Add the line and the parts to ``status``. ``now``: seconds on a monotonic clock."""
        status["auto"] = in_words(status, self._parts)
        status["auto_parts"] = list(self._parts)
        if now >= self._next:
            self._next = now + EVERY_S
            logger.info("canopy auto: %s", status["auto"])
