"""The disk tier. ``DiskStore`` is all that others need."""

from sglang_canopy.disk.store import DiskStore

__all__ = ["DiskStore"]
