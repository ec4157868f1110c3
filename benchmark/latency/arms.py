"""The arms of benchmark/latency/simulated.py: one line each.

SGLang's `priority` is not among them: it evicts by (priority, last access), and no request of
these traces has a priority, so that it is SGLang's `lru`, victim by victim.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from canopy_lab.sim.system.job import SimulatedRequest
from canopy_lab.sim.system.queue_order import QUEUE_ORDERS, QueueView

CHAT_WORKLOADS, AGENT_WORKLOADS = ("conversation", "synthetic", "pauses"), ("agentic", "mix")
UNSEEN_WORKLOADS = ("unseen-conversation", "unseen-synthetic")
"""Windows of the first two that nothing was tuned on: one seed, and only the arms of ``QUEUE_WORKLOADS``."""


class RandomOrder:
    """``random``: the queue is shuffled before every step; the placebo of every order."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def order(
        self, waiting: Sequence[SimulatedRequest], view: QueueView
    ) -> Sequence[SimulatedRequest]:
        shuffled = list(waiting)
        self._rng.shuffle(shuffled)
        return shuffled


QUEUE_ORDERS["random"] = RandomOrder


@dataclass(frozen=True)
class SystemArm:
    """A system's settings. The default of each is SGLang's, on Canopy's tree."""

    key: str
    shows: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``sim.system.SystemConfig``; ``device_policy`` also ranks the host tier."""
    host_ratio: float = 0.0
    """Host memory, as a multiple of the device's."""
    workloads: tuple[str, ...] = (*CHAT_WORKLOADS, *AGENT_WORKLOADS)

    @property
    def baseline(self) -> str:
        """Arm to compare with; its saturation sets the loads."""
        return "sglang" if not self.host_ratio else "sglang-host"


SGLANG_SETTINGS = {"whole_nodes": True, "touches_waiting": True}
"""SGLang's own ``lru``: whole nodes, recency by match, waiting prefixes refreshed."""
ORDER_SETTINGS = {"schedule_policy": "bounded-shortest"}
WA_SETTINGS = {"device_policy": "wa"}
GATE_SETTINGS = {"session_gate": "footprint"}
AUTO_SETTINGS = {**WA_SETTINGS, **ORDER_SETTINGS, **GATE_SETTINGS}
QUEUE_WORKLOADS = (*CHAT_WORKLOADS, *AGENT_WORKLOADS, *UNSEEN_WORKLOADS)

ARMS: tuple[SystemArm, ...] = (
    # The first arm of each host size is the baseline.
    SystemArm("sglang", "SGLang's defaults: lru, fcfs", SGLANG_SETTINGS, workloads=QUEUE_WORKLOADS),
    SystemArm("wa", "wa", WA_SETTINGS),
    SystemArm("order", "LRU, bounded-shortest", ORDER_SETTINGS, workloads=QUEUE_WORKLOADS),
    SystemArm("wa-order", "wa, bounded-shortest", {**WA_SETTINGS, **ORDER_SETTINGS}),
    SystemArm("auto", "--radix-eviction auto with the session gate", AUTO_SETTINGS),
    SystemArm("hrrn", "SGLang's lru and hrrn", {**SGLANG_SETTINGS, "schedule_policy": "hrrn"}, workloads=QUEUE_WORKLOADS),
    SystemArm("shortest", "SGLang's lru and shortest-prefill-first", {**SGLANG_SETTINGS, "schedule_policy": "shortest-prefill-first"}, workloads=QUEUE_WORKLOADS),
    SystemArm("few", "SGLang's lru, at most 32 requests running", {**SGLANG_SETTINGS, "max_running": 32}),
    SystemArm("shortest-few", "shortest-prefill-first, at most 32 requests running", {**SGLANG_SETTINGS, "schedule_policy": "shortest-prefill-first", "max_running": 32}),
    SystemArm("lpm", "SGLang's lru and lpm", {**SGLANG_SETTINGS, "schedule_policy": "lpm"}, workloads=QUEUE_WORKLOADS),
    SystemArm("random", "a random order", {**SGLANG_SETTINGS, "schedule_policy": "random"}, workloads=QUEUE_WORKLOADS),
    SystemArm("sglang-host", "SGLang's defaults with a host tier", SGLANG_SETTINGS, host_ratio=2.0),
    SystemArm("wa-host", "wa on both tiers", WA_SETTINGS, host_ratio=2.0),
    SystemArm("auto-host", "the same, and copies at eviction", {**AUTO_SETTINGS, "write_policy": "write_back", "session_gate_config": {"exclusive": True}}, host_ratio=2.0),
    SystemArm("back-host", "copies at eviction, which the step waits for", {**SGLANG_SETTINGS, "write_policy": "write_back"}, host_ratio=2.0),
    SystemArm("back-shortest-host", "the same with shortest-prefill-first", {**SGLANG_SETTINGS, "write_policy": "write_back", "schedule_policy": "shortest-prefill-first"}, host_ratio=2.0),
)  # fmt: skip
