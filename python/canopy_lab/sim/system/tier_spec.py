"""A tier below the device: size, bandwidth, policy and TTL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import CANOPYS_LRU, make_policy


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier below the device: an instance's host memory, or a disk."""

    capacity_bytes: float
    read_bytes_per_s: float
    """Towards the device: host to device, or disk to host."""
    write_bytes_per_s: float
    shared_channel: bool = False
    """Reads and writes share one channel."""
    policy: str = CANOPYS_LRU
    policy_config: Mapping[str, Any] = field(default_factory=dict)
    ttl: Any = None
    """Time to live since the last use: ``None`` (no expiry), seconds, or a ``TTLTable``."""
    latency_s: float = 0.0
    """Added to every transfer."""

    def __post_init__(self) -> None:
        check_number("tier capacity_bytes", self.capacity_bytes, above=0)
        check_number("tier read_bytes_per_s", self.read_bytes_per_s, above=0)
        check_number("tier write_bytes_per_s", self.write_bytes_per_s, above=0)
        check_number("tier latency_s", self.latency_s, least=0)
        if isinstance(self.ttl, (int, float)):
            check_number("tier ttl", self.ttl, above=0, infinite=True)
        make_policy(self.policy, self.policy_config)


def check_number(
    name: str,
    value: float,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    infinite: bool = False,
) -> None:
    """Raise ``CanopyError`` unless ``value`` is a number within the limit."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
    if good and (infinite or math.isfinite(value)) and value > above and value >= least:
        return
    limit = f"above {above:g}" if above > -math.inf else f"{least:g} or more"
    raise CanopyError(f"{name} must be a number {limit}, got {value!r}")
