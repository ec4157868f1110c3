"""Bandwidth of host memory and disk, from the extra time of a hit compared with the device."""

from __future__ import annotations

import statistics
import time
from typing import Any

from canopy_lab.live.profile.client import wait_until
from canopy_lab.live.profile.measure import Measurer

_SHARE = 0.4
"""Share of the device pool for one measured prompt."""
_MAX_TOKENS = 4096
_WRITTEN_S = 60.0


def measure_tiers(measurer: Measurer, kv_bytes: int) -> dict[str, dict[str, Any]]:
    """Return ``{"host": ..., "disk": ...}`` with ``read_bytes_per_s`` and ``write_bytes_per_s``.

    A tier is omitted if the server lacks it or the expected hit did not happen.
    """
    facts, bandwidths = measurer.server.facts, {}
    if not facts.get("enable_hierarchical_cache"):
        return {}
    size = int(min(measurer.server.pool_tokens * _SHARE, _MAX_TOKENS))
    host = _host(measurer, size, kv_bytes)
    if host:
        bandwidths["host"] = host
    if facts.get("hicache_storage_backend"):
        disk = _disk(measurer, size, kv_bytes)
        if disk:
            bandwidths["disk"] = disk
    return bandwidths


def _host(measurer: Measurer, size: int, kv_bytes: int) -> dict[str, Any] | None:
    server = measurer.server
    reads = []
    for _ in range(measurer.limits.repeats):
        prompt = measurer.tokens(size)
        server.generate([prompt], 1)
        device, _ = server.generate([prompt + measurer.tokens(16)], 1)
        # Evict the prompt from the device.
        for _ in range(int(server.pool_tokens / size) + 1):
            server.generate([measurer.tokens(size)], 1)
        seconds, _ = server.generate([prompt + measurer.tokens(16)], 1)
        from_host = server.cached_by_tier.get("host", 0)
        if from_host < size / 2:
            return None
        reads.append(max(seconds - device, 1e-4) / from_host)
    read_rate = kv_bytes / statistics.median(reads)
    moved = server.metric("sglang:hicache_backup_num_bytes_total")
    took_s = server.metric("sglang:hicache_backup_duration_seconds_sum")
    # Assume equal speed in both directions if the server reports no figure.
    write_rate = moved / took_s if moved and took_s else read_rate
    return {"read_bytes_per_s": read_rate, "write_bytes_per_s": write_rate}


def _disk(measurer: Measurer, size: int, kv_bytes: int) -> dict[str, Any] | None:
    server = measurer.server
    counter = "sglang:backuped_tokens_total"
    reads, writes = [], []
    for _ in range(measurer.limits.repeats):
        prompt = measurer.tokens(size)
        previous = server.metric(counter) or 0.0
        server.generate([prompt], 1)
        start_s = time.perf_counter()
        target = previous + size // server.page_tokens * server.page_tokens

        def is_written(target: float = target) -> bool:
            return (server.metric(counter) or 0.0) >= target

        if wait_until(is_written, _WRITTEN_S):
            writes.append(max(time.perf_counter() - start_s, 1e-4) / size)
        device, _ = server.generate([prompt + measurer.tokens(16)], 1)
        server.flush()
        seconds, _ = server.generate([prompt + measurer.tokens(16)], 1)
        from_disk = server.cached_by_tier.get("storage", 0)
        if from_disk < size / 2:
            # An idle server does not wait for its storage with best_effort.
            return None
        reads.append(max(seconds - device, 1e-4) / from_disk)
    if not writes:
        return None
    return {
        "read_bytes_per_s": kv_bytes / statistics.median(reads),
        "write_bytes_per_s": kv_bytes / statistics.median(writes),
    }
