"""Calls from the tree core to the tier below the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    from sglang_canopy.radix.live_request import LiveRequest


class DiskTier:
    """Null implementation of the tier that stores pages: no tier below the host, or not Canopy's. All
    calls come from the scheduler's thread."""

    active = False
    """Whether the storage backend accepts metadata with its pages. If not, the tree core skips
    ``record_node_use``, ``record_finish`` and ``unwritten_ancestors``."""

    suspended = False
    """Whether the storage does not respond; no write is begun then. The same on all ranks."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def attach(self, cache: UnifiedRadixCache) -> None:
        """Attach the cache of the tree, which exists from now on."""

    def record_arrival(self, epoch: float) -> None:
        """Register a new request; ``epoch``: seconds since 1970 when the requests' clock was 0."""

    def record_finish(self, request: LiveRequest) -> None:
        """Handle a completed request, whose path is in the tree."""

    def record_node_use(self, node: UnifiedTreeNode) -> None:
        """Record that a finished request used ``node``."""

    def before_write(self, node: UnifiedTreeNode) -> None:
        """Prepare a write of ``node``'s pages by SGLang."""

    def before_staged_write(self, node: UnifiedTreeNode) -> None:
        """Prepare a write like ``before_write``; SGLang may call it several times per write."""

    def unwritten_ancestors(self, node: UnifiedTreeNode) -> list[UnifiedTreeNode]:
        """Return the nodes above ``node`` to write before it, shallowest first."""
        return []

    def finish_copies(self) -> None:
        """Finish the pending copies of ancestors, so that no ancestor is evicted before its copy."""

    def suspend(self, reason: str) -> bool:
        """Stop using the storage until it responds again. Return whether the host memory of unfinished
        writes may be used for other KV."""
        return False

    def holds(self, page: str) -> bool:
        """Return whether this rank's disk has a page now."""
        return False

    def record_pages_read(self, node_id: int | None, hashes: Sequence[str]) -> None:
        """Record that the pages ``hashes`` were read; ``node_id``: the deepest node that now holds them."""

    def record_reset(self) -> None:
        """Record a reset of the tree. Stored pages remain."""

    def begin_drain(self, seconds: float) -> None:
        """Start the time for the drain, in which requests may still end."""

    def drain(self, seconds: float) -> None:
        """Write pages that only memory holds, and stop using host memory. The time is ``seconds`` from
        ``begin_drain`` on, if it was called, else from now on."""
