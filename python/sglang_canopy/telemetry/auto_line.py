"""Describes the state of ``--radix-eviction auto`` in one line, from a rank's status."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sglang_canopy.admission.agents import SWIFT_S
from sglang_canopy.whatif.total import describe_total

logger = logging.getLogger(__name__)

LINE_INTERVAL_S = 60.0
MIN_EVICTED_SHARE = 0.1
"""Least share of the prompt tokens that recomputes evicted KV, for advice on host memory."""
_SUFFICIENT_SHARE = 0.8
"""Share of the evicted tokens that the advised memory would hit, if one of the sizes would."""


def describe_auto(
    status: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], tool_parser: str | None = None
) -> str:
    """Return the line. ``status``: from ``StatusCollector``. ``parts``: as in ``config.server_options.AutoPart``.
    ``tool_parser``: the server's ``--tool-call-parser``."""
    inactive_parts = {part["name"]: part["why"] for part in parts if not part["active"]}
    sentences = [_describe_policy(status), _describe_order(status, inactive_parts)]
    evicted_tokens = sum(status["missed"]["tokens"].get("evicted", {}).values())
    if evicted_tokens and evicted_tokens >= MIN_EVICTED_SHARE * status["prompt_tokens"]:
        sentences += [
            _advise_memory(status, evicted_tokens),
            *_describe_agents(status["agents"], tool_parser),
        ]
    return "; ".join((*sentences, *_describe_gate(status["session_gate"])))


def _describe_policy(status: Mapping[str, Any]) -> str:
    meter = status["whatif"]
    if meter is None:
        return f"policy {status['running']}"
    floor = meter["floor"]
    if floor is None or not floor["behind"]:
        return describe_total(meter)
    return f"{describe_total(meter)}, instead of {floor['policy']}, which is behind it"


def _describe_order(status: Mapping[str, Any], inactive_parts: Mapping[str, str]) -> str:
    if "order" in inactive_parts:
        return f"SGLang's order of the queue ({inactive_parts['order']})"
    queue = status["queue"]
    if queue is None or queue["admitted"] is None:
        return "SGLang's order of the queue"
    admitted = ", ".join(f"{count} as {why}" for why, count in queue["admitted"].items())
    return f"order {queue['order']}: {queue['waiting_requests']} waiting, admitted {admitted}"


def _advise_memory(status: Mapping[str, Any], evicted_tokens: int) -> str:
    """Advise host memory for the ``evicted_tokens`` that prompts computed again."""
    tiers, scales = status["tiers"], status["missed"]["hits_with_memory"].items()
    memory_bytes = sum(
        tiers[name]["capacity_bytes"] for name in ("device", "host") if name in tiers
    )
    wanted_tokens = _SUFFICIENT_SHARE * evicted_tokens
    sufficient = [
        (scale, hit_tokens) for scale, hit_tokens in scales if hit_tokens >= wanted_tokens
    ]
    scale, hit_tokens = sufficient[0] if sufficient else list(scales)[-1]
    more_gb = (float(scale.lstrip("x")) - 1.0) * memory_bytes / 1e9
    flags = "" if "host" in tiers else " (--enable-hierarchical-cache --hicache-size)"
    return (
        f"{100 * evicted_tokens / status['prompt_tokens']:.0f} % of the prompt tokens recompute evicted KV:"
        f" {more_gb:.3g} GB more host memory{flags} would hit {100 * hit_tokens / evicted_tokens:.0f} % of them"
    )


def _describe_agents(agents: Mapping[str, Any], tool_parser: str | None) -> Iterator[str]:
    """State why no agents are recognised, if none are."""
    if agents["recognised"]:
        return
    calls = f"{tool_parser} has found no call" if tool_parser else "no --tool-call-parser"
    returned = agents["returns"]
    turns = f"none of {returned} turns came within {SWIFT_S:.0f} s of an answer"
    yield f"no agents recognised: {calls}, {turns if returned else 'no turn has returned yet'}"


def _describe_gate(gate: Mapping[str, Any] | None) -> Iterator[str]:
    if gate is None:
        return
    thrash = f"{100 * gate['thrash_share']:.0f} % of agents' prefill recomputes evicted KV"
    waiting, paused = gate["waiting_sessions"], gate["paused_sessions"]
    sessions = f"; {waiting} sessions waiting, {paused} paused" if gate["active"] else ""
    yield f"gate {'on' if gate['active'] else 'off'}: {thrash}{sessions}"


class AutoLine:
    """Reports the state of ``auto`` in every status, and once a minute in the log."""

    def __init__(self, parts: Sequence[Mapping[str, Any]], tool_parser: str | None = None) -> None:
        self._parts = parts
        self._tool_parser = tool_parser
        self._next_log_at = -math.inf

    def add_to(self, status: dict[str, Any], now: float) -> None:
        """Add the line and the parts to ``status``. ``now``: seconds on a monotonic clock."""
        status["auto"] = describe_auto(status, self._parts, self._tool_parser)
        status["auto_parts"] = list(self._parts)
        if now >= self._next_log_at:
            self._next_log_at = now + LINE_INTERVAL_S
            logger.info("canopy auto: %s", status["auto"])
