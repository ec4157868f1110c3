"""Memory of the pages that a store forgot at once, released in slices by another thread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang_canopy.policy.base import Policy

SLICE = 4096
"""Entries released at once: about a millisecond in which no other thread runs Python."""


class Retired:
    """Lists, dicts and sets, and a policy, that nothing else refers to."""

    def __init__(
        self, index: object, containers: Iterable[Any], policy: Policy, stays_s: Any
    ) -> None:
        self._index = index  # its arrays go last, with this object
        self._containers = [*containers]
        self._policy = policy
        self._stays_s = stays_s

    def next_stays(self) -> Any:
        """Return an array of pages' seconds on disk that was not returned before; empty at the end."""
        stays_s, self._stays_s = self._stays_s[:SLICE], self._stays_s[SLICE:]
        return stays_s

    def release(self) -> bool:
        """Release one slice. Returns whether nothing is left."""
        if not self._containers:
            return self._policy.release(SLICE)
        container = self._containers[-1]
        if isinstance(container, list):
            del container[-SLICE:]
        else:
            remove = container.popitem if isinstance(container, dict) else container.pop
            for _ in range(min(SLICE, len(container))):
                remove()
        if not container:
            self._containers.pop()
        return False
