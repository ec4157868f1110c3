"""Bandwidth of host memory and disk, from the extra time of a hit compared with the device."""

from __future__ import annotations

import statistics
import time
from typing import Any

from canopy_lab.live.profile.client import wait_until
from canopy_lab.live.profile.measure import Measurer

_PROMPT_SHARE = 0.4
"""Share of the device pool for one measured prompt."""
_MAX_TOKENS = 4096
_WRITE_TIMEOUT_S = 60.0


def measure_tiers(measurer: Measurer, kv_bytes: int) -> dict[str, dict[str, Any]]:
    """Return ``{"host": ..., "disk": ...}`` with ``read_bytes_per_s`` and ``write_bytes_per_s``.

    A tier is omitted if the server lacks it or the expected hit did not happen.
    """
    facts, bandwidths = measurer.server.facts, {}
    if not facts.get("enable_hierarchical_cache"):
        return {}
    prompt_tokens = int(min(measurer.server.pool_tokens * _PROMPT_SHARE, _MAX_TOKENS))
    host_bandwidth = _measure_host(measurer, prompt_tokens, kv_bytes)
    if host_bandwidth:
        bandwidths["host"] = host_bandwidth
    if facts.get("hicache_storage_backend"):
        disk_bandwidth = _measure_disk(measurer, prompt_tokens, kv_bytes)
        if disk_bandwidth:
            bandwidths["disk"] = disk_bandwidth
    return bandwidths


def _measure_host(measurer: Measurer, prompt_tokens: int, kv_bytes: int) -> dict[str, Any] | None:
    server = measurer.server
    read_s_per_token = []
    for _ in range(measurer.limits.repeats):
        prompt = measurer.random_tokens(prompt_tokens)
        server.generate([prompt], 1)
        device_s, _ = server.generate([prompt + measurer.random_tokens(16)], 1)
        # Evict the prompt from the device.
        for _ in range(int(server.pool_tokens / prompt_tokens) + 1):
            server.generate([measurer.random_tokens(prompt_tokens)], 1)
        seconds, _ = server.generate([prompt + measurer.random_tokens(16)], 1)
        from_host = server.cached_by_tier.get("host", 0)
        if from_host < prompt_tokens / 2:
            return None
        read_s_per_token.append(max(seconds - device_s, 1e-4) / from_host)
    read_rate = kv_bytes / statistics.median(read_s_per_token)
    written_bytes = server.metric("sglang:hicache_backup_num_bytes_total")
    written_s = server.metric("sglang:hicache_backup_duration_seconds_sum")
    # Assume equal speed in both directions if the server reports no figure.
    write_rate = written_bytes / written_s if written_bytes and written_s else read_rate
    return {"read_bytes_per_s": read_rate, "write_bytes_per_s": write_rate}


def _measure_disk(measurer: Measurer, prompt_tokens: int, kv_bytes: int) -> dict[str, Any] | None:
    server = measurer.server
    counter_name = "sglang:backuped_tokens_total"
    read_s_per_token, write_s_per_token = [], []
    for _ in range(measurer.limits.repeats):
        prompt = measurer.random_tokens(prompt_tokens)
        tokens_before = server.metric(counter_name) or 0.0
        server.generate([prompt], 1)
        start_s = time.perf_counter()
        target_tokens = tokens_before + prompt_tokens // server.page_tokens * server.page_tokens

        def is_written(target_tokens: float = target_tokens) -> bool:
            return (server.metric(counter_name) or 0.0) >= target_tokens

        if wait_until(is_written, _WRITE_TIMEOUT_S):
            write_s_per_token.append(max(time.perf_counter() - start_s, 1e-4) / prompt_tokens)
        device_s, _ = server.generate([prompt + measurer.random_tokens(16)], 1)
        server.flush()
        seconds, _ = server.generate([prompt + measurer.random_tokens(16)], 1)
        from_disk = server.cached_by_tier.get("storage", 0)
        if from_disk < prompt_tokens / 2:
            # An idle server does not wait for its storage with best_effort.
            return None
        read_s_per_token.append(max(seconds - device_s, 1e-4) / from_disk)
    if not write_s_per_token:
        return None
    return {
        "read_bytes_per_s": kv_bytes / statistics.median(read_s_per_token),
        "write_bytes_per_s": kv_bytes / statistics.median(write_s_per_token),
    }
