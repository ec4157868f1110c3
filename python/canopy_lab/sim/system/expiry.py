"""Expiry in a tier: one TTL for all, or one for each subtree group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sglang_canopy.records import Leaf
from sglang_canopy.ttl.table import RESIDUAL


class Expiry:
    """``ttl`` is seconds, or a ``ttl.table.TTLTable`` over the trace's own block ids."""

    def __init__(self, ttl: Any) -> None:
        self._table = None if isinstance(ttl, (int, float)) else ttl
        self._ttl_s = ttl if self._table is None else 0.0

    @classmethod
    def of(cls, ttl: Any) -> Expiry | None:
        """Make an ``Expiry``, or ``None`` if no page expires."""
        return None if ttl is None or ttl == math.inf else cls(ttl)

    def group(self, path: Sequence[int]) -> int:
        return RESIDUAL if self._table is None else self._table.group_of(path)

    def over(self, leaf: Leaf, now: float) -> bool:
        if self._table is None:
            return now - leaf.last_access > self._ttl_s
        return now - leaf.last_access > self._table.ttl_s(leaf.group, leaf.category)
