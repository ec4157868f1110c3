"""Average and peak use of each tier, sampled at the end of each step."""

from __future__ import annotations

from collections.abc import Sequence

from canopy_lab.sim.system.disk import Disk
from canopy_lab.sim.system.instance import Instance


class _TierContent:
    """Tokens held by one instance at the last reading."""

    __slots__ = ("device_tokens", "host_tokens", "since_s")

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.device_tokens = self.host_tokens = 0


class TierUsage:
    """Means and peaks of the tiers' contents, summed over instances."""

    def __init__(
        self, instances: Sequence[Instance], disks: Sequence[Disk], kv_bytes: int, start_s: float
    ) -> None:
        self._kv_bytes = kv_bytes
        self._contents = {instance: _TierContent(start_s) for instance in instances}
        self._device_token_s = self._host_token_s = self._disk_byte_s = 0.0
        self._device_tokens = self._host_tokens = 0
        self._peak_device_tokens = self._peak_host_tokens = 0
        self._peak_disk_bytes = 0.0
        self._disks = disks
        self._disk_since_s, self._disk_bytes = start_s, 0.0
        self.peak_queue_length = 0

    def sample(self, now: float, instance: Instance) -> None:
        content, tree = self._contents[instance], instance.tree
        span_s = now - content.since_s
        self._device_token_s += content.device_tokens * span_s
        self._host_token_s += content.host_tokens * span_s
        content.since_s = now
        device, host = tree.device_used_tokens + tree.private_tokens, tree.host_used_tokens
        self._device_tokens += device - content.device_tokens
        self._host_tokens += host - content.host_tokens
        content.device_tokens, content.host_tokens = device, host
        if self._device_tokens > self._peak_device_tokens:
            self._peak_device_tokens = self._device_tokens
        if self._host_tokens > self._peak_host_tokens:
            self._peak_host_tokens = self._host_tokens
        if instance.waiting_count > self.peak_queue_length:
            self.peak_queue_length = instance.waiting_count
        if self._disks:
            self._disk_byte_s += self._disk_bytes * (now - self._disk_since_s)
            self._disk_since_s = now
            disk_bytes = 0.0
            for disk in self._disks:
                disk_bytes += disk.tree.used_blocks * disk.block_bytes
            self._disk_bytes = disk_bytes
            if disk_bytes > self._peak_disk_bytes:
                self._peak_disk_bytes = disk_bytes

    def finish(self, now: float) -> None:
        """Extend the last samples to the end of the run."""
        for content in self._contents.values():
            span_s = now - content.since_s
            self._device_token_s += content.device_tokens * span_s
            self._host_token_s += content.host_tokens * span_s
        self._disk_byte_s += self._disk_bytes * (now - self._disk_since_s)

    def means(self, span_s: float) -> dict[str, float]:
        kv_bytes = self._kv_bytes
        return {
            "device": self._device_token_s * kv_bytes / span_s,
            "host": self._host_token_s * kv_bytes / span_s,
            "disk": self._disk_byte_s / span_s,
        }

    def peaks(self) -> dict[str, float]:
        return {
            "device": float(self._peak_device_tokens * self._kv_bytes),
            "host": float(self._peak_host_tokens * self._kv_bytes),
            "disk": self._peak_disk_bytes,
        }
