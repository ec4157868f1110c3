"""A discrete-event simulator of SGLang instances over HBM, DRAM and disk (arXiv 2603.08739)."""

from sglang_canopy.sim.system.config import SystemConfig, TierSpec
from sglang_canopy.sim.system.engine_profile import (
    Bandwidth,
    EngineProfile,
    load_profile,
    profile_names,
)
from sglang_canopy.sim.system.events import EventLog
from sglang_canopy.sim.system.result import SystemResult
from sglang_canopy.sim.system.run import simulate_system
from sglang_canopy.sim.system.workload import Workload

__all__ = [
    "Bandwidth",
    "EngineProfile",
    "EventLog",
    "SystemConfig",
    "SystemResult",
    "TierSpec",
    "Workload",
    "load_profile",
    "profile_names",
    "simulate_system",
]
