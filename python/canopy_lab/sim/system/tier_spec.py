"""A tier below the device: size, bandwidth, policy, TTL and expiry."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any

from sglang_canopy import declared
from sglang_canopy.declared import declare_key
from sglang_canopy.policy.registry import CANOPYS_LRU, make_policy
from sglang_canopy.records import Leaf
from sglang_canopy.ttl.table import RESIDUAL


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier below the device: an instance's host memory, or a disk."""

    capacity_bytes: float = declare_key(MISSING, "size of the tier", low=1)
    read_bytes_per_s: float = declare_key(
        MISSING, "towards the device: host to device, or disk to host", low=1
    )
    write_bytes_per_s: float = declare_key(MISSING, "from the device", low=1)
    shared_channel: bool = False
    """Reads and writes share one channel."""
    policy: str = CANOPYS_LRU
    policy_config: Mapping[str, Any] = field(default_factory=dict)
    ttl: Any = None
    """Time to live since the last use: ``None`` (no expiry), seconds, or a ``TTLTable``."""
    latency_s: float = declare_key(0.0, "added to every transfer", low=0)

    def __post_init__(self) -> None:
        declared.check(self)
        make_policy(self.policy, self.policy_config)


class Expiry:
    """``ttl`` is seconds, or a ``ttl.table.TTLTable`` over the trace's own block ids."""

    def __init__(self, ttl: Any) -> None:
        self._table = None if isinstance(ttl, (int, float)) else ttl
        self._ttl_s = ttl if self._table is None else 0.0

    @classmethod
    def from_ttl(cls, ttl: Any) -> Expiry | None:
        """Make an ``Expiry``, or ``None`` if no page expires."""
        return None if ttl is None or ttl == math.inf else cls(ttl)

    def group(self, path: Sequence[int]) -> int:
        return RESIDUAL if self._table is None else self._table.group_of(path)

    def has_expired(self, leaf: Leaf, now: float) -> bool:
        if self._table is None:
            return now - leaf.last_access > self._ttl_s
        return now - leaf.last_access > self._table.ttl_s(leaf.group, leaf.category)
