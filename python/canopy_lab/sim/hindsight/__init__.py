"""Policies that know the trace's future: bounds for the simulator, never for a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from canopy_lab.sim.hindsight.belady import Belady
from canopy_lab.sim.hindsight.end_aware_tlru import EndAwareTLRU
from canopy_lab.sim.hindsight.future import Future, HindsightPolicy
from canopy_lab.sim.hindsight.tail_belady import LengthAwareTLRU, TailBelady
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.registry import parse_config

_CLASSES: dict[str, type[HindsightPolicy]] = {
    policy.name: policy for policy in (Belady, TailBelady, EndAwareTLRU, LengthAwareTLRU)
}


def hindsight_names() -> tuple[str, ...]:
    """Return the names of the hindsight policies for ``canopy simulate --policy``."""
    return tuple(_CLASSES)


def hindsight_class(name: str) -> type[HindsightPolicy]:
    if name not in _CLASSES:
        raise CanopyError(
            f"unknown hindsight policy {name!r}; choose one of: {', '.join(hindsight_names())}"
        )
    return _CLASSES[name]


def make_hindsight(name: str, future: Future, config: Mapping[str, Any] | None = None) -> Policy:
    """Build a policy for the trace of ``future``. Raises ``CanopyError`` for an unknown name."""
    policy = hindsight_class(name)
    return policy(parse_config(name, policy.Config, config or {}), future)
