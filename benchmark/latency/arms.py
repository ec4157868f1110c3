"""The arms of benchmark/latency/simulated.py: one line each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Arm:
    """A system's settings; what is not named is as in SGLang's defaults on Canopy's tree."""

    key: str
    shows: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``sim.system.SystemConfig``; ``device_policy`` is that of the host too."""
    host: float = 0.0
    """Host memory, as a multiple of the device's."""
    workloads: tuple[str, ...] = ("conversation", "synthetic", "agentic")

    @property
    def baseline(self) -> str:
        """The arm that it is compared with, and whose saturation gives the loads."""
        return "sglang" if not self.host else "sglang-host"


SGLANG = {"whole_nodes": True, "waiting_prefixes": "touched"}
"""SGLang's own ``lru``: whole nodes, recency by match, waiting prefixes refreshed."""

ARMS: tuple[Arm, ...] = (
    # The first of each host size is the baseline.
    Arm("sglang", "SGLang's defaults: lru, fcfs", SGLANG),
    Arm("lru", "canopy-lru: LRU, evicting what is needed"),
    Arm("wa", "wa", {"device_policy": "wa"}),
    Arm("wa-ignored", "wa, nothing done for who waits", {"device_policy": "wa",
                                                         "waiting_prefixes": "ignored"}),
    Arm("etlru", "etlru, for the 90th percentile",
        {"device_policy": "etlru", "device_policy_config": {"ttft_percentile": 90}}),
    Arm("tlru", "canopy-tlru, for the 90th percentile",
        {"device_policy": "canopy-tlru", "device_policy_config": {"ttft_percentile": 90}}),
    Arm("slru", "SGLang's slru", {"device_policy": "slru", "whole_nodes": True,
                                  "device_policy_config": {"protected_share": 1.0},
                                  "waiting_prefixes": "matched"}),
    Arm("lpm", "SGLang's lru and lpm", {**SGLANG, "schedule_policy": "lpm"}),
    Arm("hrrn", "SGLang's lru and hrrn", {**SGLANG, "schedule_policy": "hrrn"}),
    Arm("wa-hrrn", "wa and SGLang's hrrn", {"device_policy": "wa", "schedule_policy": "hrrn"}),
    Arm("random", "a random order, the placebo of every order", {**SGLANG,
                                                                 "schedule_policy": "random"}),
    Arm("gate-static", "at most 12 sessions at once, the placebo of every gate",
        {"session_gate": "static", "session_gate_config": {"sessions": 12}},
        workloads=("agentic",)),
    Arm("sglang-host", "SGLang's defaults with a host tier", SGLANG, host=2.0),
    Arm("wa-host", "wa on both tiers", {"device_policy": "wa"}, host=2.0),
    Arm("selective-host", "copies at the second use", {**SGLANG,
        "write_policy": "write_through_selective"}, host=2.0),
    Arm("back-host", "copies at eviction, which the step waits for",
        {**SGLANG, "write_policy": "write_back"}, host=2.0),
)  # fmt: skip
