"""A discrete-event simulator of SGLang instances over HBM, DRAM and disk (arXiv 2603.08739)."""

from canopy_lab.sim.system.config import SystemConfig, TierSpec
from canopy_lab.sim.system.engine_profile import (
    Bandwidth,
    EngineProfile,
    load_profile,
    profile_names,
)
from canopy_lab.sim.system.result import SystemResult
from canopy_lab.sim.system.run import simulate_system
from canopy_lab.sim.system.workload import Workload

__all__ = [
    "Bandwidth",
    "EngineProfile",
    "SystemConfig",
    "SystemResult",
    "TierSpec",
    "Workload",
    "load_profile",
    "profile_names",
    "simulate_system",
]
