"""Which modules are compiled, and where what was made of them lies."""

from __future__ import annotations

import hashlib
import platform
import sys
from pathlib import Path

from sglang_canopy.private_file import cache_folder

SOURCES = Path(__file__).resolve().parents[2]
"""The folder that holds the packages."""

PACKAGES = ("canopy_lab", "sglang_canopy")
"""Whose code the modules import."""

_SYSTEM = (
    *("channel", "costs", "decode", "disk", "engine_profile", "instance", "job", "loads"),
    *("meter", "nodes", "placement", "prefetch", "prefill", "queue", "queue_order", "reservation"),
    *("routing", "run", "tree", "waiting", "workload", "write_policy"),
)
_STRUCTURES = ("cells", "end_queue", "lazy_heap")
_POLICY = ("awaited", "block_tree", "cut")

MODULES = (
    "sglang_canopy.records",
    *(f"sglang_canopy.policy.{name}" for name in _POLICY),
    *(f"sglang_canopy.policy.structures.{name}" for name in _STRUCTURES),
    *(f"canopy_lab.sim.system.{name}" for name in _SYSTEM),
)
"""What most of a simulation's time is spent in. Policies and their base class are not among them,
so that one in plain Python fits as it is; a class of these modules cannot be derived from."""

GROUP = "canopy_simulator"
SHARED = f"{GROUP}__mypyc"
"""The module that holds the code of all, made by mypyc."""


def source_of(module: str) -> Path:
    """The Python file of one of ``MODULES``."""
    return SOURCES / Path(*module.split(".")).with_suffix(".py")


def home() -> Path:
    """The folder of all that was compiled, of other versions too."""
    return cache_folder("compiled")


def folder() -> Path:
    """Where the code of just these sources lies, for this Python and processor."""
    made_of = hashlib.sha256()
    for part in (sys.implementation.cache_tag or "", sys.platform, platform.machine()):
        made_of.update(part.encode() + b"\0")
    for module in MODULES:
        made_of.update(module.encode() + b"\0" + source_of(module).read_bytes() + b"\0")
    return home() / made_of.hexdigest()[:24]
