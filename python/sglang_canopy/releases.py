"""Differences between the tested releases of SGLang, found by attribute and signature, and what this
process does without on another release.

No other file asks which release is installed, or whether SGLang has a name (``test_architecture.py``).
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

TESTED_RELEASES = ("0.5.22", "0.5.23")
"""Releases that the tests run on, oldest first; the last one is pinned."""

RELEASE_RANGE = f"{TESTED_RELEASES[0]} to {TESTED_RELEASES[-1]}"

SWITCHED_OFF: dict[str, str] = {}
"""What this process does without, and the reason."""
START_REFUSALS: list[str] = []
"""Reasons why a server with flags of Canopy does not start."""
UNCALLED_HOOKS: set[str] = set()
"""Hooked functions that SGLang must call for its first request, less those it has called."""

logger = logging.getLogger(__name__)


def switch_off(feature: str, reason: str) -> None:
    """Record and log, once, that this process does without ``feature``."""
    if feature not in SWITCHED_OFF:
        SWITCHED_OFF[feature] = reason
        logger.warning("canopy: %s: %s", feature, reason)


def record_uncalled_hooks() -> None:
    """Record the hooks that SGLang did not call for its first request, which it sends itself."""
    for target in UNCALLED_HOOKS:
        switch_off(target, "SGLang did not call it for the first request; its hook has no effect")


def existing_fields(named_tuple: Any, *fields: str) -> tuple[str, ...]:
    """Return those ``fields`` that the class ``named_tuple`` has. ``MatchResult.last_visited_node_id``
    is new in 0.5.23."""
    return tuple(name for name in fields if name in named_tuple._fields)


def drop_none(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that are not None: SGLang passes them only since 0.5.23."""
    return {name: value for name, value in arguments.items() if value is not None}


def decode_context_position(config: Any) -> tuple[int, int]:
    """Return rank and size of ``HiCacheStorageConfig``'s decode-context group, which 0.5.22 lacks."""
    return getattr(config, "dcp_rank", 0), getattr(config, "dcp_size", 1)


def reports_aborts(scheduler: Any) -> bool:
    """Return whether a scheduler reports each request that leaves its queue. 0.5.22 sends the abort
    itself, without that method."""
    return hasattr(scheduler, "send_abort_output")


def call_eviction(evict: Any, node: Any, tracker: Any, **lists: Any) -> None:
    """Call a private eviction of ``UnifiedTreeCore`` with the lists that it takes. ``cache_actions`` is
    new in 0.5.23."""
    parameters = inspect.signature(evict).parameters
    evict(node, tracker, **{name: value for name, value in lists.items() if name in parameters})
