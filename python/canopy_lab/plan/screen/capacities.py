"""The tiers of many configurations, side by side, in tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from canopy_lab.plan.screen.replay import Tiers
from canopy_lab.sim.system.config import SystemConfig, TierSpec


class Capacities:
    """The tiers of some configurations in tokens, and what is looked up for each of them."""

    def __init__(
        self,
        configs: Sequence[SystemConfig],
        kv_bytes: float,
        span_s: float,
        fresh: float,
        shared: NDArray[np.bool_],
        instances: int,
    ) -> None:
        def tokens(tier: TierSpec | None) -> float:
            return 0.0 if tier is None else tier.capacity_bytes / kv_bytes

        def each(value: Any) -> NDArray[np.float64]:
            return np.array([value(c) for c in configs], float)

        self.shared = shared
        self.device = each(lambda c: c.device_tokens)
        host = each(lambda c: tokens(c.host))
        self.disk = each(lambda c: tokens(c.disk))
        part = np.where(shared, 1.0 / instances, 1.0) / kv_bytes
        reads = part * each(lambda c: c.disk.read_bytes_per_s if c.disk else math.inf)
        writes = part * each(lambda c: c.disk.write_bytes_per_s if c.disk else kv_bytes * 1e12)
        # With write-through the host has what the device has, and no less than that is found.
        self.host = np.maximum(host, self.device)
        # A disk that is too slow for all that is new refuses the rest, which then does not come to
        # the host either: what is there stays longer. What is used often is offered again.
        self.taken = np.minimum(1.0, (writes * span_s + host) / fresh)
        self.kept = np.maximum(host / self.taken, self.device)
        waits = {"best_effort": 0.0, "wait_complete": math.inf}
        self.tiers = Tiers(
            device=self.device,
            page=each(lambda c: c.page_tokens).astype(np.int64),
            chunk=each(lambda c: c.chunked_prefill_tokens),
            host_speed=each(lambda c: c.host.read_bytes_per_s / kv_bytes if c.host else math.inf),
            host=host,
            disk_read=reads,
            disk_write=writes,
            disk_shared=each(lambda c: c.disk is not None and c.disk.shared_channel) > 0,
            wait_base=each(lambda c: waits.get(c.prefetch_policy, c.prefetch_timeout_base_s)),
            wait_per_token=each(
                lambda c: (
                    0.0 if c.prefetch_policy in waits else c.prefetch_timeout_per_ki_token_s / 1024
                )
            ),
            running=each(lambda c: c.max_running),
            threshold=each(lambda c: c.prefetch_threshold_tokens).astype(np.int64),
        )
        self._all = np.unique(np.concatenate([self.device, self.host, self.kept, self.disk]))

    def blocks(self, block_tokens: int) -> NDArray[np.float64]:
        """The capacities that are looked up."""
        return self._all / block_tokens

    def tokens(
        self, found: NDArray[np.int32], block_tokens: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Tokens that device, host and disk hold of each prompt, shape (requests, configurations),
        from the blocks found for ``blocks``."""

        def at(capacity: NDArray[np.float64]) -> NDArray[np.int64]:
            return found[:, np.searchsorted(self._all, capacity)].astype(np.int64) * block_tokens

        host, disk = at(self.host), at(self.disk)
        slow = self.taken < 1
        if slow.any():
            share = (at(self.kept) * np.sqrt(self.taken)).astype(np.int64)
            host = np.where(slow, np.maximum(host, share), host)
            disk = np.where(slow, 0, disk)
        return at(self.device), host, disk
