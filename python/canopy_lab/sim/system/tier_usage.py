"""Average and peak use of each tier, sampled at the end of each step."""

from __future__ import annotations

from collections.abc import Sequence

from canopy_lab.sim.system.disk import Disk
from canopy_lab.sim.system.instance import Instance


class _TierContent:
    """Tokens held by one instance at the last reading."""

    __slots__ = ("device", "host", "since_s")

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.device = self.host = 0


class TierUsage:
    """Means and peaks of the tiers' contents, summed over instances."""

    def __init__(
        self, instances: Sequence[Instance], disks: Sequence[Disk], kv_bytes: int, start_s: float
    ) -> None:
        self._kv_bytes = kv_bytes
        self._contents = {instance: _TierContent(start_s) for instance in instances}
        self._device_token_s = self._host_token_s = self._disk_byte_s = 0.0
        self._device = self._host = 0
        self._peak_device = self._peak_host = 0
        self._peak_disk = 0.0
        self._disks = disks
        self._disk_since_s, self._disk_held = start_s, 0.0
        self.peak_queue = 0

    def sample(self, now: float, instance: Instance) -> None:
        content, tree = self._contents[instance], instance.tree
        span_s = now - content.since_s
        self._device_token_s += content.device * span_s
        self._host_token_s += content.host * span_s
        content.since_s = now
        device, host = tree.device_used + tree.private, tree.host_used
        self._device += device - content.device
        self._host += host - content.host
        content.device, content.host = device, host
        if self._device > self._peak_device:
            self._peak_device = self._device
        if self._host > self._peak_host:
            self._peak_host = self._host
        if instance.waiting_count > self.peak_queue:
            self.peak_queue = instance.waiting_count
        if self._disks:
            self._disk_byte_s += self._disk_held * (now - self._disk_since_s)
            self._disk_since_s = now
            disk_held = 0.0
            for disk in self._disks:
                disk_held += disk.tree.used_blocks * disk.block_bytes
            self._disk_held = disk_held
            if disk_held > self._peak_disk:
                self._peak_disk = disk_held

    def finish(self, now: float) -> None:
        """Extend the last samples to the end of the run."""
        for content in self._contents.values():
            span_s = now - content.since_s
            self._device_token_s += content.device * span_s
            self._host_token_s += content.host * span_s
        self._disk_byte_s += self._disk_held * (now - self._disk_since_s)

    def means(self, span_s: float) -> dict[str, float]:
        kv_bytes = self._kv_bytes
        return {
            "device": self._device_token_s * kv_bytes / span_s,
            "host": self._host_token_s * kv_bytes / span_s,
            "disk": self._disk_byte_s / span_s,
        }

    def peaks(self) -> dict[str, float]:
        return {
            "device": float(self._peak_device * self._kv_bytes),
            "host": float(self._peak_host * self._kv_bytes),
            "disk": self._peak_disk,
        }
