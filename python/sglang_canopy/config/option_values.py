"""Predicates on the value of an SGLang option: whether it selects a row of ``setups.py``."""

from __future__ import annotations

import functools
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


def has_full_prefill_graph(graph_config: Any) -> bool:
    """Return whether ``--cuda-graph-config``, as given (a dict) or as resolved by SGLang, has one
    full prefill graph."""
    is_given = isinstance(graph_config, Mapping)
    get_phase = graph_config.get if is_given else functools.partial(getattr, graph_config)
    prefill_config = get_phase("prefill", None) or {}
    if isinstance(prefill_config, Mapping):
        return prefill_config.get("backend") == "full"
    return getattr(prefill_config, "backend", None) == "full"
