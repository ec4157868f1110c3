"""Predicates on the value of an SGLang option: whether it selects a row of ``setups.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def equals(*values: Any) -> Callable[[Any], bool]:
    """Match any of ``values``."""
    return lambda value: value in values


def other_than(*usual: Any) -> Callable[[Any], bool]:
    """Match a value that is set and none of ``usual``."""
    return lambda value: value is not None and value not in usual


def exceeds(limit: int) -> Callable[[Any], bool]:
    """Match a number above ``limit``."""
    return lambda value: (value or 0) > limit


def has_full_prefill_graph(config: Any) -> bool:
    """Return whether ``--cuda-graph-config``, as given (a dict) or as resolved by SGLang, has one
    full prefill graph."""
    phase_of = (
        config.get if isinstance(config, Mapping) else lambda phase: getattr(config, phase, None)
    )
    prefill = phase_of("prefill") or {}
    if isinstance(prefill, Mapping):
        return prefill.get("backend") == "full"
    return getattr(prefill, "backend", None) == "full"
