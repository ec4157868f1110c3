"""The request for a plan. The keys of ``--search`` are its fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from canopy_lab.plan.choice import Constraint
from canopy_lab.plan.objective import METRICS, PlanMetric
from canopy_lab.plan.search import SearchOptions
from canopy_lab.plan.space import GROUP
from sglang_canopy import declared
from sglang_canopy.declared import declare_key
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import CANOPYS_LRU

DEFAULT_LOADS = (0.8, 1.2)
"""Request rates of the sensitivity check, relative to the trace."""
DRAM_LEVELS, DISK_LEVELS = 5, 3
SAMPLE_REQUESTS = 8_000
"""Requests of the search, if the trace has more than twice as many."""


def split_names(text: str, separator: str = ",") -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(separator) if part.strip())
    if not names or len(set(names)) < len(names):
        raise CanopyError(f"must name each once, separated by {separator!r}, got {text!r}")
    return names


def _parse_loads(text: str) -> tuple[float, ...]:
    try:
        loads = [float(part) for part in split_names(text, "/")]
    except ValueError:
        loads = [-1.0]
    if min(loads) <= 0 or max(loads) > 1000:
        raise CanopyError(f"loads must be numbers above 0, such as 2/3; got {text!r}")
    return tuple(dict.fromkeys((*DEFAULT_LOADS, *loads)))


@dataclass(frozen=True, slots=True)
class SearchKeys(declared.Checked):
    """The search and its report: the keys of ``--search``."""

    dram_gib: float = declare_key(
        0.0, "most DRAM, all instances together", metavar="G", low=0,
        shown_default="and at most: the KV that more than one request uses",
    )  # fmt: skip
    disk_gib: float = declare_key(
        0.0, "largest disk of an instance, or of a shared store", metavar="G", low=0,
        shown_default="the distinct KV",
    )  # fmt: skip
    dram_levels: int = declare_key(
        DRAM_LEVELS, "sizes of DRAM in the first grid", metavar="N", low=1, high=64
    )
    disk_levels: int = declare_key(
        DISK_LEVELS, "sizes of disk in the first grid", metavar="N", low=1, high=64
    )
    sample_requests: int = declare_key(
        SAMPLE_REQUESTS,
        "search a trace twice as long on its N busiest; 0: on all",
        metavar="N",
        low=0,
    )
    evaluations: int = declare_key(
        SearchOptions().evaluations, "most configurations to evaluate", metavar="N", low=1
    )
    loads: tuple[float, ...] = declare_key(
        DEFAULT_LOADS, "also simulate the choice at X times the traffic", metavar="X/Y",
        parse=_parse_loads, shown_default="0.8/1.2",
    )  # fmt: skip
    checks: str = declare_key(
        "on", "evaluate neighbours of the choice, and other loads", choices=("on", "off")
    )


@dataclass(frozen=True, slots=True)
class PlanRequest(SearchKeys):
    """Input of a plan. Sizes of 0 and empty choices are derived from the trace and the prices."""

    disks: tuple[str, ...] | None = None
    """``None``: every class of the price list."""
    instances: tuple[int, ...] = (1,)
    policy: str = CANOPYS_LRU
    """Policy of every tier."""
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: {"ttl": (None, GROUP)})
    """Values to try by the name of a knob (``space.KNOBS``)."""
    constraints: tuple[Constraint, ...] = ()
    minimise: PlanMetric = METRICS["cost"]
