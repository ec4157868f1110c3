"""The disk store: pages of KV in files, bounded, and right or absent after a crash.

``DiskStore`` is all that others need."""

from sglang_canopy.disk.store import DiskStore

__all__ = ["DiskStore"]
