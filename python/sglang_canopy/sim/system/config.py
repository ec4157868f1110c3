"""What is simulated: the instances, their tiers and the scheduler's limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.cut import QUANTUM_TOKENS
from sglang_canopy.policy.registry import make_policy

ROUTINGS = ("round-robin", "least-loaded", "prefix-aware")
WRITE_POLICIES = ("write_through", "write_back")
PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier below the device: host memory of an instance, or a disk."""

    capacity_bytes: float
    read_bytes_per_s: float
    """Towards the device: host to device, or disk to host."""
    write_bytes_per_s: float
    shared_channel: bool = False
    """Reads and writes take turns on one channel; else each has its own."""
    policy: str = "lru"
    policy_config: Mapping[str, Any] = field(default_factory=dict)
    ttl: Any = None
    """``None`` (no expiry), seconds for every node, or a ``tier.ttl.TTLTable``: what was last used
    longer ago than that is gone, tails first."""
    latency_s: float = 0.0
    """Added to every transfer, whatever its size."""

    def __post_init__(self) -> None:
        _number("tier capacity_bytes", self.capacity_bytes, above=0)
        _number("tier read_bytes_per_s", self.read_bytes_per_s, above=0)
        _number("tier write_bytes_per_s", self.write_bytes_per_s, above=0)
        _number("tier latency_s", self.latency_s, least=0)
        if isinstance(self.ttl, (int, float)):
            _number("tier ttl", self.ttl, above=0, infinite=True)
        make_policy(self.policy, self.policy_config)

    @classmethod
    def provisioned(
        cls,
        capacity_bytes: float,
        *,
        bytes_per_s_per_byte: float,
        at_least: float = 0.0,
        at_most: float = math.inf,
        **others: Any,
    ) -> TierSpec:
        """A cloud disk, whose bandwidth is bought with its size, between two limits in bytes/s."""
        bandwidth = min(max(capacity_bytes * bytes_per_s_per_byte, at_least), at_most)
        return cls(capacity_bytes, bandwidth, bandwidth, **others)


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemConfig:
    """Identical instances, each with its own device and host memory, and what serves them."""

    device_tokens: int
    """KV pool of one instance, in tokens (SGLang's ``--max-total-tokens``)."""
    instances: int = 1
    routing: str = "round-robin"
    device_policy: str = "lru"
    device_policy_config: Mapping[str, Any] = field(default_factory=dict)
    host: TierSpec | None = None
    """Of each instance."""
    disk: TierSpec | None = None
    """One for all instances, unless ``disk_per_instance``. Needs a host tier, as in SGLang."""
    disk_per_instance: bool = False
    max_running: int = 256
    """Requests that decode at the same time (``--max-running-requests``)."""
    chunked_prefill_tokens: int = 8192
    """Of one prefill step, over all its requests (``--chunked-prefill-size``)."""
    max_prefill_tokens: int = 16384
    """Of one prefill step, where a single long request may be larger (``--max-prefill-tokens``)."""
    page_tokens: int = 1
    write_policy: str = "write_through"
    """``write_through``: device to host at insertion, host to disk after it. ``write_back``: to
    the host at eviction from the device."""
    prefetch_policy: str = "best_effort"
    """When a request that waits for its disk prefetch may start: at once, with what has come
    (``best_effort``); when all has (``wait_complete``); or after a time (``timeout``)."""
    prefetch_threshold_tokens: int = 256
    """Fewer tokens on disk than this are not fetched."""
    prefetch_timeout_base_s: float = 1.0
    prefetch_timeout_per_ki_token_s: float = 0.25
    load_back_threshold_tokens: int = 10
    """Fewer tokens on the host than this are computed anew."""
    whole_nodes: bool = False
    """Evict whole nodes, as SGLang's own policies do; else only what is needed."""
    quantum_tokens: int = QUANTUM_TOKENS
    """Least tokens that an eviction by need takes at once (as on a server)."""
    model: str | None = None
    """The model that is to be simulated; a profile of another one is refused."""

    def __post_init__(self) -> None:
        for name in (
            "device_tokens",
            "instances",
            "max_running",
            "chunked_prefill_tokens",
            "max_prefill_tokens",
            "page_tokens",
            "quantum_tokens",
        ):
            _number(name, getattr(self, name), above=0)
        for name in ("prefetch_threshold_tokens", "load_back_threshold_tokens"):
            _number(name, getattr(self, name), least=0)
        _one_of("routing", self.routing, ROUTINGS)
        _one_of("write_policy", self.write_policy, WRITE_POLICIES)
        _one_of("prefetch_policy", self.prefetch_policy, PREFETCH_POLICIES)
        if self.disk is not None and self.host is None:
            raise CanopyError(
                "a disk tier needs a host tier: SGLang reads from storage into host memory; "
                "give host as well"
            )
        make_policy(self.device_policy, self.device_policy_config)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise CanopyError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _number(
    name: str,
    value: float,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    infinite: bool = False,
) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
    if good and (infinite or math.isfinite(value)) and value > above and value >= least:
        return
    limit = f"above {above:g}" if above > -math.inf else f"{least:g} or more"
    raise CanopyError(f"{name} must be a number {limit}, got {value!r}")
