"""What the disk tier needs of the tree above it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sglang_canopy.radix.clock import RequestClock

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    from sglang_canopy.radix.counters import Counters
    from sglang_canopy.radix.live import LiveCache


class Tree(Protocol):
    """The part of ``CanopyTreeCore`` that is used here."""

    clock: RequestClock
    counters: Counters
    live: LiveCache
    page_size: int
    root_node: UnifiedTreeNode

    def contains(self, node: UnifiedTreeNode) -> bool:
        """Whether ``node`` is still in the tree."""

    def node_by_id(self, node_id: int) -> UnifiedTreeNode:
        """The node of SGLang's handle."""

    def keep_path(self, node: UnifiedTreeNode, until: float, tenant: str | None) -> None:
        """Keep the path to ``node`` until then, as far as the tenant's budget goes."""

    def build_backup_kv_action(self, node_id: int) -> Any:
        """SGLang's action that copies a node to the host."""

    def _split_node(self, key: Any, child: UnifiedTreeNode, split_len: int) -> tuple[Any, Any]:
        """SGLang's split: the new node above ``child``, and a copy to make, if any."""


@dataclass(slots=True)
class Attachment:
    """The cache that tree and disk tier belong to, and the difference between their clocks."""

    cache: UnifiedRadixCache | None = None
    """Known once the cache exists."""
    epoch: float = 0.0
    """Seconds since 1970 when the requests' clock was 0."""

    @property
    def backend(self) -> Any:
        """SGLang's storage backend, whose ever it is; ``None`` without one."""
        return getattr(getattr(self.cache, "cache_controller", None), "storage_backend", None)
