"""Policies that know the trace's future: bounds for the simulator, never for a server."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from canopy_lab.sim.hindsight.future import Future, HindsightPolicy
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.registry import parse_config

_MODULES = {
    "belady": "belady",
    "tail-belady": "tail_belady",
    "end-aware-tlru": "end_aware_tlru",
    "length-aware-tlru": "length_aware_tlru",
}


def hindsight_names() -> tuple[str, ...]:
    """Return the names of the hindsight policies for ``canopy simulate --policy``."""
    return tuple(_MODULES)


def hindsight_class(name: str) -> type[HindsightPolicy]:
    if name not in _MODULES:
        raise CanopyError(
            f"unknown hindsight policy {name!r}; choose one of: {', '.join(hindsight_names())}"
        )
    module = importlib.import_module(f"canopy_lab.sim.hindsight.{_MODULES[name]}")
    made: type[HindsightPolicy] = module.POLICY
    return made


def make_hindsight(name: str, future: Future, config: Mapping[str, Any] | None = None) -> Policy:
    """Build a hindsight policy for the trace of ``future``.

    Raises ``CanopyError`` for an unknown name or option.
    """
    made = hindsight_class(name)
    return made(parse_config(name, made.Config, config or {}), future)
