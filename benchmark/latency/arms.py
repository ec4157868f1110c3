"""The arms of benchmark/latency/simulated.py: one line each.

SGLang's `priority` is not among them: it evicts by (priority, last access), and no request of
these traces has a priority, so that it is SGLang's `lru`, victim by victim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import placebos  # noqa: F401

CHAT, AGENTS = ("conversation", "synthetic", "pauses"), ("agentic", "mix")


@dataclass(frozen=True)
class Arm:
    """A system's settings. The default of each is SGLang's, on Canopy's tree."""

    key: str
    shows: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``sim.system.SystemConfig``; ``device_policy`` also ranks the host tier."""
    host: float = 0.0
    """Host memory, as a multiple of the device's."""
    workloads: tuple[str, ...] = (*CHAT, *AGENTS)
    first: bool = False
    """Whether ``run --first`` runs it."""

    @property
    def baseline(self) -> str:
        """Arm to compare with; its saturation sets the loads."""
        return "sglang" if not self.host else "sglang-host"


SGLANG = {"whole_nodes": True, "waiting_prefixes": "touched"}
"""SGLang's own ``lru``: whole nodes, recency by match, waiting prefixes refreshed."""
ORDER = {"schedule_policy": "bounded-shortest"}
WA = {"device_policy": "wa"}
GATE = {"session_gate": "footprint"}
AUTO = {**WA, **ORDER, **GATE}

ARMS: tuple[Arm, ...] = (
    # The first arm of each host size is the baseline.
    Arm("sglang", "SGLang's defaults: lru, fcfs", SGLANG, first=True),
    Arm("wa", "wa", WA, first=True),
    Arm("order", "LRU, bounded-shortest", ORDER, first=True),
    Arm("wa-order", "wa, bounded-shortest", {**WA, **ORDER}, first=True),
    Arm("auto", "--radix-eviction auto: wa, the order, the gate", AUTO, first=True),
    Arm("gate", "LRU, the session gate", GATE, workloads=AGENTS, first=True),
    Arm("hrrn", "SGLang's lru and hrrn", {**SGLANG, "schedule_policy": "hrrn"}),
    Arm("shortest", "SGLang's lru and shortest-prefill-first",
        {**SGLANG, "schedule_policy": "shortest-prefill-first"}),
    Arm("wa-hrrn", "wa and SGLang's hrrn", {**WA, "schedule_policy": "hrrn"}),
    Arm("lru", "canopy-lru: LRU, evicting what is needed"),
    Arm("few", "SGLang's lru, at most 32 requests running", {**SGLANG, "max_running": 32}),
    Arm("shortest-few", "shortest-prefill-first, at most 32 requests running",
        {**SGLANG, "schedule_policy": "shortest-prefill-first", "max_running": 32}),
    Arm("shortest-sessions", "shortest-prefill-first and SGLang's session-aware cache",
        {**SGLANG, "schedule_policy": "shortest-prefill-first", "session_refs": "closed"}),
    Arm("lpm", "SGLang's lru and lpm", {**SGLANG, "schedule_policy": "lpm"}),
    Arm("random", "a random order, the placebo of every order", {**SGLANG,
                                                                 "schedule_policy": "random"}),
    Arm("sessions", "SGLang's session-aware cache, sessions closed at their last answer",
        {**SGLANG, "session_refs": "closed"}),
    Arm("sessions-kept", "the same, sessions never closed", {**SGLANG, "session_refs": "kept"}),
    Arm("gate-static", "at most 12 sessions at once, the placebo of every gate",
        {"session_gate": "static", "session_gate_config": {"sessions": 12}}, workloads=AGENTS),
    Arm("etlru", "etlru, for the 90th percentile",
        {"device_policy": "etlru", "device_policy_config": {"ttft_percentile": 90}}),
    Arm("tlru", "canopy-tlru, for the 90th percentile",
        {"device_policy": "canopy-tlru", "device_policy_config": {"ttft_percentile": 90}}),
    Arm("slru", "SGLang's slru", {"device_policy": "slru", "whole_nodes": True,
                                  "device_policy_config": {"protected_share": 1.0},
                                  "waiting_prefixes": "matched"}),
    Arm("wa-late", "wa with --canopy-protect-waiting off", {**WA, "waiting_prefixes": "awaited"}),
    Arm("gate-chat", "LRU, the session gate, where nothing thrashes", GATE, workloads=CHAT),
    Arm("sglang-host", "SGLang's defaults with a host tier", SGLANG, host=2.0, first=True),
    Arm("wa-host", "wa on both tiers", WA, host=2.0, first=True),
    Arm("order-host", "LRU, bounded-shortest", ORDER, host=2.0),
    Arm("auto-host", "--radix-eviction auto: the same, and copies at eviction",
        {**AUTO, "write_policy": "write_back", "session_gate_config": {"exclusive": True}},
        host=2.0),
    Arm("wa-late-host", "wa on both tiers, --canopy-protect-waiting off",
        {**WA, "waiting_prefixes": "awaited"}, host=2.0),
    Arm("lru-late-host", "LRU, the same", {"waiting_prefixes": "awaited"}, host=2.0),
    Arm("back-host", "copies at eviction, which the step waits for",
        {**SGLANG, "write_policy": "write_back"}, host=2.0),
    Arm("back-shortest-host", "the same with shortest-prefill-first",
        {**SGLANG, "write_policy": "write_back", "schedule_policy": "shortest-prefill-first"},
        host=2.0),
    Arm("back-sessions-host", "copies at eviction, SGLang's session-aware cache",
        {**SGLANG, "write_policy": "write_back", "session_refs": "closed"}, host=2.0),
    Arm("selective-host", "copies at the second use", {**SGLANG,
        "write_policy": "write_through_selective"}, host=2.0),
    Arm("sessions-host", "SGLang's session-aware cache on both tiers, sessions closed",
        {**SGLANG, "session_refs": "closed"}, host=2.0),
    Arm("gate-host", "LRU, the session gate", GATE, host=2.0, workloads=AGENTS),
)  # fmt: skip
